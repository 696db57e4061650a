//! `sglang-config`: the option string of the SGLang storage backend, printed or checked.

use clap::Args;
use serde_json::{Map, Value, json};

use crate::failure::{Done, Failure};
use crate::output::Output;
use crate::sglang_options::{self, INTERFACE, LOADER, PATH, PREFIX_KEYS};
use crate::{FINE, PROBLEMS};

/// Prints the option string for `--hicache-storage-backend-extra-config` of SGLang, or checks one.
///
/// The string asks the engine for zero-copy calls and for the keys before each call's, which it leaves out by default.
#[derive(Args)]
pub struct SglangConfig {
    /// Folder of the root
    #[arg(long, required_unless_present = "check")]
    path: Option<String>,
    /// Budget of a new root: 500GiB
    #[arg(long)]
    capacity: Option<String>,
    /// Revision of the weights, where the engine does not load them from a folder that tells it
    #[arg(long)]
    revision: Option<String>,
    /// Any other option; the value is JSON, or text
    #[arg(long = "option", value_name = "NAME=VALUE", value_parser = named)]
    others: Vec<(String, Value)>,
    /// Checks this option string, or the JSON file that follows an @, instead of printing one
    #[arg(long, value_name = "TEXT|@FILE", conflicts_with_all = ["path", "capacity", "revision", "others"])]
    check: Option<String>,
}

fn named(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| json!(value))))
}

impl SglangConfig {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        match &self.check {
            Some(text) => check(text, output),
            None => self.print(output),
        }
    }

    fn print(&self, output: &mut Output<'_>) -> Done {
        let mut options: Map<String, Value> =
            LOADER.iter().map(|&(name, value)| (name.to_owned(), json!(value))).collect();
        options.insert(INTERFACE.into(), json!(true));
        options.insert(PREFIX_KEYS.into(), json!(true));
        let given = [(PATH, &self.path), ("capacity", &self.capacity), ("revision", &self.revision)];
        for (name, value) in given {
            if let Some(value) = value {
                options.insert(name.into(), json!(value));
            }
        }
        options.extend(self.others.iter().cloned());
        let text = Value::Object(options.clone()).to_string();
        sglang_options::parse(&text).map_err(Failure::new)?;
        match output.is_json() {
            true => output.document("sglang-config", json!({ "options": options })),
            false => output.line(&text),
        }
        Ok(FINE)
    }
}

fn check(text: &str, output: &mut Output<'_>) -> Done {
    let read;
    let text = match text.strip_prefix('@') {
        Some(path) => {
            let path = std::path::Path::new(path);
            read = std::fs::read_to_string(path).map_err(|error| Failure::io("cannot read", path, &error))?;
            &read
        }
        None => text,
    };
    let (error, advice) = match sglang_options::advice(text) {
        Ok(advice) => (None, advice),
        Err(error) => (Some(error), Vec::new()),
    };
    let is_fine = error.is_none() && advice.is_empty();
    if output.is_json() {
        output.document("sglang-config", json!({ "fine": is_fine, "error": error, "advice": advice }));
    } else if is_fine {
        output.line("fine");
    } else {
        error.iter().chain(&advice).for_each(|sentence| output.line(sentence));
    }
    Ok(if is_fine { FINE } else { PROBLEMS })
}
