//! The one place that writes: data to `out`, words to `err`.
//!
//! Text from files may hold anything; what would move a terminal's cursor is escaped here. A reader that went
//! away (`| head`) is no failure: the rest is dropped.

use std::io::{BufRead, ErrorKind, IsTerminal, Write};
use std::path::Path;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde_json::{Map, Value, json};

use crate::FAILED;

/// Version of the shape of all JSON documents; raised when a field goes or changes its meaning.
const SCHEMA: u32 = 1;

/// Where a command's words and data go.
pub struct Output<'a> {
    out: &'a mut dyn Write,
    err: &'a mut dyn Write,
    answers: Option<&'a mut dyn BufRead>,
    json: bool,
    is_closed: bool,
    failed: Option<std::io::Error>,
}

impl<'a> Output<'a> {
    /// Writes to `out` and `err`, asks `answers`.
    pub fn new(out: &'a mut dyn Write, err: &'a mut dyn Write, answers: Option<&'a mut dyn BufRead>) -> Self {
        Output { out, err, answers, json: false, is_closed: false, failed: None }
    }

    /// Asked for JSON.
    pub fn set_json(&mut self, json: bool) {
        self.json = json;
    }

    /// Whether JSON was asked for.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Whether nobody reads any more.
    pub fn is_closed(&self) -> bool {
        self.is_closed || self.failed.is_some()
    }

    /// A JSON document of `command`; `schema` and `command` are added.
    pub fn document(&mut self, command: &str, body: Value) {
        let text = format!("{:#}\n", Self::stamped(command, body));
        self.write(&text);
    }

    /// A JSON document on one line, for documents that follow one another.
    pub fn document_line(&mut self, command: &str, body: Value) {
        let text = format!("{}\n", Self::stamped(command, body));
        self.write(&text);
    }

    fn stamped(command: &str, body: Value) -> Value {
        let mut document = match body {
            Value::Object(fields) => fields,
            other => Map::from_iter([("value".to_owned(), other)]),
        };
        document.insert("schema".into(), json!(SCHEMA));
        document.insert("command".into(), json!(command));
        Value::Object(document)
    }

    /// Text as it is.
    pub fn text(&mut self, text: &str) {
        self.write(text);
    }

    /// A line of data.
    pub fn line(&mut self, text: &str) {
        let text = format!("{}\n", clean(text));
        self.write(&text);
    }

    /// `name` and `value`, names in one column.
    pub fn field(&mut self, name: &str, value: &str) {
        self.line(&format!("{name:<12}  {value}"));
    }

    /// A table; columns whose header starts with `#` are numbers, to the right.
    pub fn table(&mut self, headers: &[&str], rows: Vec<Vec<String>>) {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(headers.iter().map(|header| header.trim_start_matches('#')));
        for row in rows {
            table.add_row(row.iter().map(|cell| clean(cell)));
        }
        for (index, header) in headers.iter().enumerate() {
            if let Some(column) = table.column_mut(index) {
                column.set_padding((0, 2));
                if header.starts_with('#') {
                    column.set_cell_alignment(CellAlignment::Right);
                }
            }
        }
        let lines = table.lines().map(|line| format!("{}\n", line.trim_end()));
        let text: String = lines.filter(|line| line != "\n").collect();
        self.write(&text);
    }

    /// A line of words for people.
    pub fn words(&mut self, text: &str) {
        // Nobody is left to be told that words cannot be written.
        let _ = writeln!(self.err, "{}", clean(text)).and_then(|()| self.err.flush());
    }

    /// Asks a yes-or-no question; `None` when there is nobody to ask.
    pub fn ask(&mut self, question: &str) -> Option<bool> {
        let answers = self.answers.as_mut()?;
        let _ = write!(self.err, "{} [y/N] ", clean(question)).and_then(|()| self.err.flush());
        let mut answer = String::new();
        answers.read_line(&mut answer).ok()?;
        Some(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
    }

    /// A bar on the terminal for `total` steps; hidden where there is no terminal.
    pub fn progress(&self, total: u64, what: &'static str) -> indicatif::ProgressBar {
        if self.answers.is_none() || !std::io::stderr().is_terminal() {
            return indicatif::ProgressBar::hidden();
        }
        let template = format!("{{bar:40}} {{pos}}/{{len}} {what}, {{msg}} {{elapsed}}");
        let style = indicatif::ProgressStyle::with_template(&template);
        let bar = indicatif::ProgressBar::new(total);
        style.map_or(bar.clone(), |style| bar.with_style(style))
    }

    /// Ends the output; the exit code, which is another one when data could not be written.
    pub fn finish(mut self, code: i32) -> i32 {
        if !self.is_closed
            && self.failed.is_none()
            && let Err(error) = self.out.flush()
        {
            self.note_failure(error);
        }
        match self.failed.take() {
            Some(error) => {
                self.words(&format!("hicache-store: cannot write the output: {error}"));
                FAILED
            }
            None => code,
        }
    }

    fn write(&mut self, text: &str) {
        if self.is_closed() {
            return;
        }
        if let Err(error) = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()) {
            self.note_failure(error);
        }
    }

    fn note_failure(&mut self, error: std::io::Error) {
        match error.kind() {
            ErrorKind::BrokenPipe => self.is_closed = true,
            _ => self.failed = Some(error),
        }
    }
}

/// Text that cannot move a cursor, change a colour or start a line: what does not print is escaped.
pub fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '"' | '\'' | '\\' => out.push(letter),
            _ => out.extend(letter.escape_debug()),
        }
    }
    out
}

/// A path as text.
pub fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Bytes for people.
pub fn size(bytes: u64) -> String {
    bytesize::ByteSize(bytes).to_string()
}

/// Wall clock in ns since 1970 for people.
pub fn time(ns: u64) -> String {
    let seconds = i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX);
    jiff::Timestamp::from_second(seconds).map_or_else(|_| "unknown".to_owned(), |time| time.to_string())
}
