//! A record: one call, one return or one look at the state, as it was at that moment.

use super::wire::{Reader, Writer};
use crate::digest;
use crate::error::Result;
use crate::rules::{Rule, Rules};
use std::fmt;

/// What a record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A call, with chosen arguments.
    Called,
    /// Its return, with chosen results.
    Returned,
    /// Digests of state, or one change of it.
    State,
}

impl Kind {
    /// Every kind; the position is the number in a log.
    pub const ALL: [Kind; 3] = [Kind::Called, Kind::Returned, Kind::State];

    /// Word for people.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Called => "called",
            Kind::Returned => "returned",
            Kind::State => "state",
        }
    }
}

/// A field of a record. Formatted when it is recorded, since arguments may change later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Nothing was given.
    Absent,
    /// A truth value.
    Bool(bool),
    /// A number.
    Int(i64),
    /// A digest.
    Digest(u64),
    /// Text.
    Text(String),
    /// Several values.
    List(Vec<Value>),
}

impl From<i64> for Value {
    fn from(value: i64) -> Value {
        Value::Int(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Value {
        Value::Text(value.to_owned())
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Absent => f.write_str("-"),
            Value::Bool(value) => write!(f, "{value}"),
            Value::Int(value) => write!(f, "{value}"),
            Value::Digest(value) => write!(f, "#{value:016x}"),
            Value::Text(value) => write!(f, "{value:?}"),
            Value::List(values) => {
                f.write_str("[")?;
                for (place, value) in values.iter().enumerate() {
                    write!(f, "{}{value}", if place == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
        }
    }
}

/// One record of one stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The engine's step, which orders streams against each other.
    pub step: u64,
    /// What it is about.
    pub kind: Kind,
    /// The function, or the part of the state.
    pub name: String,
    /// Chosen expressions, in a fixed order.
    pub fields: Vec<Value>,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {} {} {}(", self.step, self.kind.name(), self.name)?;
        for (place, value) in self.fields.iter().enumerate() {
            write!(f, "{}{value}", if place == 0 { "" } else { ", " })?;
        }
        f.write_str(")")
    }
}

/// Deepest list in a list, so that a hostile log cannot exhaust the stack.
const MAX_DEPTH: u32 = 8;

impl Record {
    /// Canonical bytes: every length stands before what it measures, so no two records have the same.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        self.write(&mut writer);
        writer.finish()
    }

    /// Reads canonical bytes.
    ///
    /// # Errors
    ///
    /// `corrupt` for anything that [`Record::to_bytes`] does not write.
    pub fn from_bytes(bytes: &[u8]) -> Result<Record> {
        let mut reader = Reader::new("record", bytes);
        let name = reader.text("name")?.to_owned();
        let record = Record::read_rest(name, &mut reader)?;
        reader.finish()?;
        Ok(record)
    }

    /// Digest of the record.
    pub fn digest(&self, rules: Rules) -> u64 {
        self.digest_in(rules, &mut Writer::new())
    }

    /// The same, in memory that is there already.
    pub(super) fn digest_in(&self, rules: Rules, writer: &mut Writer) -> u64 {
        if rules.hold(Rule::FramedFields) {
            writer.clear();
            self.write(writer);
            return digest::of_bytes(writer.written());
        }
        let joined: String = self.fields.iter().map(|field| field.to_string().replace('"', "")).collect();
        digest::of_bytes(format!("{}{}{}{joined}", self.step, self.kind.name(), self.name).as_bytes())
    }

    fn write(&self, writer: &mut Writer) {
        writer.text(&self.name);
        self.write_rest(writer);
    }

    pub(super) fn write_rest(&self, writer: &mut Writer) {
        writer.byte(Kind::ALL.iter().position(|&kind| kind == self.kind).unwrap_or(0) as u8);
        writer.number(self.step);
        writer.number(self.fields.len() as u64);
        self.fields.iter().for_each(|field| write_value(writer, field));
    }

    pub(super) fn read_rest(name: String, reader: &mut Reader<'_>) -> Result<Record> {
        let byte = reader.byte("kind")?;
        let Some(&kind) = Kind::ALL.get(usize::from(byte)) else {
            return Err(reader.corrupt(format!("kind {byte} of a record")));
        };
        let step = reader.number("step")?;
        let fields = read_values(reader, 0)?;
        Ok(Record { step, kind, name, fields })
    }
}

fn write_value(writer: &mut Writer, value: &Value) {
    match value {
        Value::Absent => writer.byte(0),
        Value::Bool(false) => writer.byte(1),
        Value::Bool(true) => writer.byte(2),
        Value::Int(number) => {
            writer.byte(3);
            // Small numbers of either sign are short.
            writer.number(((number << 1) ^ (number >> 63)) as u64);
        }
        Value::Digest(digest) => {
            writer.byte(4);
            writer.bytes(&digest.to_le_bytes());
        }
        Value::Text(text) => {
            writer.byte(5);
            writer.text(text);
        }
        Value::List(values) => {
            writer.byte(6);
            writer.number(values.len() as u64);
            values.iter().for_each(|value| write_value(writer, value));
        }
    }
}

fn read_values(reader: &mut Reader<'_>, depth: u32) -> Result<Vec<Value>> {
    let count = reader.number("number of fields")?;
    // No memory is taken for a number alone: a value has at least one byte.
    (0..count).map(|_| read_value(reader, depth)).collect()
}

fn read_value(reader: &mut Reader<'_>, depth: u32) -> Result<Value> {
    Ok(match reader.byte("tag of a field")? {
        0 => Value::Absent,
        1 => Value::Bool(false),
        2 => Value::Bool(true),
        3 => {
            let number = reader.number("number")?;
            Value::Int((number >> 1) as i64 ^ -((number & 1) as i64))
        }
        4 => Value::Digest(reader.u64("digest")?),
        5 => Value::Text(reader.text("text")?.to_owned()),
        6 if depth < MAX_DEPTH => Value::List(read_values(reader, depth + 1)?),
        tag => return Err(reader.corrupt(format!("tag {tag} of a field at depth {depth}"))),
    })
}
