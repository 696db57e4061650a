//! What is wrong with a plan, in values and in words.

use std::fmt;

/// A side of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Where runs are read.
    Source,
    /// Where they are written.
    Destination,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Source => "source",
            Side::Destination => "destination",
        })
    }
}

/// Why a plan cannot be made or may not run. Addresses and lengths in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanError {
    /// A number outside its range.
    Count {
        /// Which number.
        what: &'static str,
        /// The least it may be.
        least: u64,
        /// The most it may be.
        most: u64,
        /// What it is.
        found: u64,
    },
    /// A field that contradicts the others, as after a change by hand or in transit.
    Field {
        /// Number of the segment in the plan.
        segment: usize,
        /// The side that has it.
        side: Side,
        /// Which field.
        field: &'static str,
        /// What it should be.
        expected: u64,
        /// What it is.
        found: u64,
    },
    /// Some run would leave the memory lent to its side.
    OutsideExtents {
        /// Number of the segment in the plan.
        segment: usize,
        /// The side that leaves it.
        side: Side,
        /// Address of the first byte that runs could touch; negative or beyond 64 bits where strides run away.
        first: i128,
        /// One past the last such byte.
        end: i128,
    },
    /// An index vector is not in the memory lent for indices, or not aligned to its integers.
    IndexOutsideExtents {
        /// Number of the segment in the plan.
        segment: usize,
        /// The side that has it.
        side: Side,
        /// Its address.
        address: u64,
        /// Bytes that would be read.
        bytes: u64,
    },
    /// The runs of one segment's destination lie on one another.
    RunsOverlap {
        /// Number of the segment in the plan.
        segment: usize,
    },
    /// A destination lies on another segment's destination, or on a source: the result would depend on the order.
    SegmentsOverlap {
        /// The segment that writes.
        segment: usize,
        /// The other segment.
        other: usize,
        /// Which side of the other one.
        side: Side,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlanError::Count { what, least, most, found } => {
                write!(f, "segment plan: expected {what} of {least} to {most}, found {found}")
            }
            PlanError::Field { segment, side, field, expected, found } => {
                write!(f, "segment {segment}, {side}: expected {field} {expected:#x}, found {found:#x}")
            }
            PlanError::OutsideExtents { segment, side, first, end } => write!(
                f,
                "segment {segment}, {side}: runs reach from {first:#x} to {end:#x}, which no memory lent to it holds"
            ),
            PlanError::IndexOutsideExtents { segment, side, address, bytes } => write!(
                f,
                "segment {segment}, {side}: expected an aligned index of {bytes} bytes inside the memory lent for indices, found address {address:#x}"
            ),
            PlanError::RunsOverlap { segment } => {
                write!(f, "segment {segment}: the strides of the destination put runs on one another")
            }
            PlanError::SegmentsOverlap { segment, other, side } => {
                write!(f, "segment {segment} writes where the {side} of segment {other} may be")
            }
        }
    }
}

impl std::error::Error for PlanError {}

pub(super) fn in_range(
    what: &'static str,
    found: impl Into<u64>,
    least: u32,
    most: u32,
) -> Result<(), PlanError> {
    let (found, least, most) = (found.into(), u64::from(least), u64::from(most));
    if (least..=most).contains(&found) {
        return Ok(());
    }
    Err(PlanError::Count { what, least, most, found })
}
