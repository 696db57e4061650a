//! Element types of a pool's rows: one closed list with one canonical name each.
//!
//! The name is part of a pool's identity, so two names for one type would be a needless miss, and one name
//! for two types would be a wrong read. Aliases are therefore resolved here, before anything is hashed.

use crate::error::{Error, Result};
use std::fmt;

/// The real run-time element type of a pool or component, not the storage type of the tensor that holds it
/// (the engine keeps fp8 rows in `uint8` tensors).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 64-bit float.
    Float64,
    /// IEEE 32-bit float.
    Float32,
    /// IEEE 16-bit float.
    Float16,
    /// Brain 16-bit float.
    BFloat16,
    /// 8-bit float, 4 exponent and 3 mantissa bits, finite only (NVIDIA).
    Float8E4m3fn,
    /// 8-bit float, 5 exponent and 2 mantissa bits.
    Float8E5m2,
    /// As `Float8E4m3fn` with another bias and no negative zero (AMD CDNA3).
    Float8E4m3fnuz,
    /// As `Float8E5m2` with another bias and no negative zero (AMD CDNA3).
    Float8E5m2fnuz,
    /// 8-bit exponent, the scale type of the MX formats.
    Float8E8m0fnu,
    /// Signed 64-bit integer.
    Int64,
    /// Signed 32-bit integer.
    Int32,
    /// Signed 16-bit integer.
    Int16,
    /// Signed 8-bit integer.
    Int8,
    /// Unsigned 8-bit integer, or opaque bytes described by a row format.
    UInt8,
    /// Signed 4-bit integer, two to a byte; needs scales.
    Int4,
    /// Bare 4-bit float, two to a byte; needs scales.
    Float4E2m1,
    /// MX block format: `float8_e4m3fn` payload, one scale per 32 elements beside it.
    MxFp8,
    /// MX block format: `float4_e2m1` payload, one scale per 32 elements beside it.
    MxFp4,
    /// NVIDIA block format: `float4_e2m1` payload, one `float8_e4m3fn` scale per 16 elements beside it.
    NvFp4,
    /// `float4_e2m1` payload with one MX scale per 16 elements beside it (the engine's `fp4_mx_block16`).
    Fp4MxBlock16,
}

impl DType {
    /// Every type of the list.
    pub const ALL: [DType; 20] = [
        DType::Float64,
        DType::Float32,
        DType::Float16,
        DType::BFloat16,
        DType::Float8E4m3fn,
        DType::Float8E5m2,
        DType::Float8E4m3fnuz,
        DType::Float8E5m2fnuz,
        DType::Float8E8m0fnu,
        DType::Int64,
        DType::Int32,
        DType::Int16,
        DType::Int8,
        DType::UInt8,
        DType::Int4,
        DType::Float4E2m1,
        DType::MxFp8,
        DType::MxFp4,
        DType::NvFp4,
        DType::Fp4MxBlock16,
    ];

    /// Reads a canonical name, a torch name (`torch.bfloat16`) or a usual alias (`bf16`, `half`,
    /// `fp8_e4m3`), in any case.
    ///
    /// `fp8_e4m3` and `fp8_e5m2` mean the `fn`/IEEE-like types. On AMD parts the engine uses the same two
    /// words for the `fnuz` types: pass the torch name of the tensor's logical type there.
    ///
    /// # Errors
    ///
    /// `Config` for an unknown name, and, with the reason, for `auto`, an empty name and `fp8`, none of
    /// which says what the bytes are.
    pub fn parse(text: &str) -> Result<DType> {
        let lower = text.to_ascii_lowercase();
        let word = lower.strip_prefix("torch.").unwrap_or(&lower);
        if let Some(dtype) = DType::ALL.into_iter().find(|dtype| dtype.name() == word) {
            return Ok(dtype);
        }
        let dtype = match word {
            "double" | "fp64" | "f64" => DType::Float64,
            "float" | "fp32" | "f32" => DType::Float32,
            "half" | "fp16" | "f16" => DType::Float16,
            "bf16" => DType::BFloat16,
            "fp8_e4m3" | "fp8_e4m3fn" | "float8_e4m3" => DType::Float8E4m3fn,
            "fp8_e5m2" => DType::Float8E5m2,
            "fp8_e4m3fnuz" => DType::Float8E4m3fnuz,
            "fp8_e5m2fnuz" => DType::Float8E5m2fnuz,
            "long" | "i64" => DType::Int64,
            "int" | "i32" => DType::Int32,
            "short" | "i16" => DType::Int16,
            "i8" => DType::Int8,
            "u8" | "byte" => DType::UInt8,
            "fp4" | "fp4_e2m1" | "float4_e2m1fn" | "float4_e2m1fn_x2" => DType::Float4E2m1,
            "" | "none" => {
                return Err(Error::config(
                    "the dtype is empty: give the run-time type of the cache, for example bfloat16",
                ));
            }
            "auto" => {
                return Err(Error::config(
                    "dtype \"auto\" does not say what the bytes are: give the type that it resolved to, for example bfloat16",
                ));
            }
            "fp8" | "float8" => {
                return Err(Error::config(format!(
                    "dtype {text:?} does not say which 8-bit float: give one of float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz"
                )));
            }
            _ => {
                let known: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
                let known = known.join(", ");
                return Err(Error::config(format!("unknown dtype {text:?}: expected one of {known}")));
            }
        };
        Ok(dtype)
    }

    /// The canonical name, as it enters a pool's identity.
    pub fn name(self) -> &'static str {
        match self {
            DType::Float64 => "float64",
            DType::Float32 => "float32",
            DType::Float16 => "float16",
            DType::BFloat16 => "bfloat16",
            DType::Float8E4m3fn => "float8_e4m3fn",
            DType::Float8E5m2 => "float8_e5m2",
            DType::Float8E4m3fnuz => "float8_e4m3fnuz",
            DType::Float8E5m2fnuz => "float8_e5m2fnuz",
            DType::Float8E8m0fnu => "float8_e8m0fnu",
            DType::Int64 => "int64",
            DType::Int32 => "int32",
            DType::Int16 => "int16",
            DType::Int8 => "int8",
            DType::UInt8 => "uint8",
            DType::Int4 => "int4",
            DType::Float4E2m1 => "float4_e2m1",
            DType::MxFp8 => "mxfp8",
            DType::MxFp4 => "mxfp4",
            DType::NvFp4 => "nvfp4",
            DType::Fp4MxBlock16 => "fp4_mx_block16",
        }
    }

    /// Bits of one element of the payload; block scales are not counted, they are a component of their own.
    pub fn bits(self) -> u32 {
        match self {
            DType::Float64 | DType::Int64 => 64,
            DType::Float32 | DType::Int32 => 32,
            DType::Float16 | DType::BFloat16 | DType::Int16 => 16,
            DType::Float8E4m3fn
            | DType::Float8E5m2
            | DType::Float8E4m3fnuz
            | DType::Float8E5m2fnuz
            | DType::Float8E8m0fnu
            | DType::Int8
            | DType::UInt8
            | DType::MxFp8 => 8,
            DType::Int4 | DType::Float4E2m1 | DType::MxFp4 | DType::NvFp4 | DType::Fp4MxBlock16 => 4,
        }
    }

    /// True where the payload means nothing without scales stored beside it for each page.
    pub fn needs_scales(self) -> bool {
        matches!(
            self,
            DType::Int4
                | DType::Float4E2m1
                | DType::MxFp8
                | DType::MxFp4
                | DType::NvFp4
                | DType::Fp4MxBlock16
        )
    }

    /// True for the two 16-bit floats, whose high and low bytes compress better apart.
    pub fn is_16_bit_float(self) -> bool {
        matches!(self, DType::Float16 | DType::BFloat16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_and_is_unique() {
        for (i, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(DType::parse(dtype.name()).unwrap(), dtype);
            assert_eq!(DType::parse(&format!("torch.{}", dtype.name())).unwrap(), dtype);
            assert!(DType::ALL[..i].iter().all(|other| other.name() != dtype.name()));
        }
    }

    #[test]
    fn aliases_resolve() {
        let expected = [
            ("torch.bfloat16", DType::BFloat16),
            ("BF16", DType::BFloat16),
            ("fp16", DType::Float16),
            ("torch.half", DType::Float16),
            ("fp8_e4m3", DType::Float8E4m3fn),
            ("torch.float8_e5m2", DType::Float8E5m2),
            ("torch.float4_e2m1fn_x2", DType::Float4E2m1),
            ("torch.uint8", DType::UInt8),
        ];
        for (text, dtype) in expected {
            assert_eq!(DType::parse(text).unwrap(), dtype, "{text}");
        }
    }

    #[test]
    fn words_that_name_no_type_are_refused_with_the_reason() {
        for (text, part) in [
            ("auto", "resolved to"),
            ("", "is empty"),
            ("torch.", "is empty"),
            ("fp8", "which 8-bit float"),
            ("bfloat17", "unknown dtype \"bfloat17\""),
            (" bf16", "unknown dtype"),
        ] {
            let error = DType::parse(text).unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Config);
            assert!(error.message().contains(part), "{text:?}: {error}");
        }
    }
}
