//! The kernels of one device: where they came from, and what was tried before.

use std::ffi::CStr;
use std::fmt;
use std::sync::OnceLock;

use super::cache::compiled;
use super::driver::attribute;
use super::image::{EMBEDDED, Entry, EntryKind, Image};
use super::nvrtc::Nvrtc;
use super::{CudaError, Driver, Function, Library, Primary};

/// Compute capability (10 x major + minor) from which on the kernels run.
const OLDEST: u32 = 80;

/// Compute capability from which on the bulk kernel runs.
pub const OLDEST_FOR_BULK: u32 = 90;

/// Devices whose kernels are kept.
const MAX_DEVICES: usize = 64;

/// Vector widths of the register kernels, in bytes.
pub const WIDTHS: [u32; 5] = [16, 8, 4, 2, 1];

const COPY_NAMES: [&CStr; 5] = [
    c"hicache_segment_copy_v16",
    c"hicache_segment_copy_v8",
    c"hicache_segment_copy_v4",
    c"hicache_segment_copy_v2",
    c"hicache_segment_copy_v1",
];

/// What the environment variable `HICACHE_CUDA_KERNELS` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wanted {
    /// `auto`: the best that there is, in the order of [`Source`].
    #[default]
    Auto,
    /// `embedded`: kernels built in, or the copy engine.
    Embedded,
    /// `nvrtc`: kernels compiled here, or the copy engine.
    Nvrtc,
    /// `dma`: the copy engine.
    Dma,
    /// `off`: the CPU.
    Off,
}

impl Wanted {
    /// The name of the variable.
    pub const VARIABLE: &str = "HICACHE_CUDA_KERNELS";

    /// Reads a value of the variable.
    ///
    /// # Errors
    /// A sentence for a word that is none of the five.
    pub fn parse(word: &str) -> Result<Wanted, String> {
        match word {
            "" | "auto" => Ok(Wanted::Auto),
            "embedded" => Ok(Wanted::Embedded),
            "nvrtc" => Ok(Wanted::Nvrtc),
            "dma" => Ok(Wanted::Dma),
            "off" => Ok(Wanted::Off),
            _ => Err(format!(
                "expected {} to be auto, embedded, nvrtc, dma or off, found {word:?}",
                Wanted::VARIABLE
            )),
        }
    }

    /// What the environment asks for.
    ///
    /// # Errors
    /// As for [`Wanted::parse`].
    pub fn from_environment() -> Result<Wanted, String> {
        Wanted::parse(&std::env::var(Wanted::VARIABLE).unwrap_or_default())
    }
}

/// What moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// Kernels that were built in.
    Embedded,
    /// Kernels compiled on this machine, now or earlier.
    Nvrtc,
    /// No kernels: the copy engine, a copy for each run.
    CopyEngine,
    /// No device: the CPU.
    Cpu,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Embedded => "embedded kernels",
            Source::Nvrtc => "kernels compiled by NVRTC",
            Source::CopyEngine => "the copy engine",
            Source::Cpu => "the CPU",
        })
    }
}

/// What was chosen and why, for `stat` and for logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// What moves the bytes.
    pub chosen: Source,
    /// Compute capability of the device, 10 x major + minor; 0 where it was not asked.
    pub capability: u32,
    /// What was tried in order, and what came of it.
    pub steps: Vec<(Source, String)>,
}

/// The kernels of one device.
#[derive(Debug)]
pub struct Kernels {
    pub(super) driver: &'static Driver,
    pub(super) capability: u32,
    /// Most dynamic shared memory of a block, in bytes.
    pub(super) shared_bytes: u32,
    pub(super) copy: [Function; 5],
    pub(super) mixed: Function,
    pub(super) bulk: Option<Function>,
    pub(super) index_check: Function,
    /// The context that the functions may belong to.
    pub(super) primary: Primary,
}

/// The outcome of looking for kernels.
#[derive(Debug)]
pub struct Loaded {
    /// The kernels, if there are any.
    pub kernels: Option<Kernels>,
    /// How it came to that.
    pub report: Report,
}

impl Loaded {
    /// The outcome for device `ordinal`, found out at the first call and kept: loading may take a second, so it
    /// belongs into the start of a store and not into a request.
    ///
    /// # Errors
    /// A sentence for an ordinal of [`MAX_DEVICES`] or more, and for an environment variable that says nothing known.
    pub fn of_device(ordinal: u32) -> Result<&'static Loaded, String> {
        static LOADED: [OnceLock<Loaded>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];
        let wanted = Wanted::from_environment()?;
        let place = LOADED
            .get(ordinal as usize)
            .ok_or_else(|| format!("expected a device below {MAX_DEVICES}, found {ordinal}"))?;
        Ok(place.get_or_init(|| Loaded::look(ordinal, wanted, EMBEDDED)))
    }

    /// Looks for kernels for device `ordinal`, first in the image `embedded`.
    pub fn look(ordinal: u32, wanted: Wanted, embedded: &[u8]) -> Loaded {
        let mut report = Report { chosen: Source::Cpu, capability: 0, steps: Vec::new() };
        if wanted == Wanted::Off {
            report.steps.push((Source::Cpu, format!("{} is off", Wanted::VARIABLE)));
            return Loaded { kernels: None, report };
        }
        let driver = match Driver::get() {
            Ok(driver) => driver,
            Err(unavailable) => {
                report.steps.push((Source::Cpu, unavailable.to_string()));
                return Loaded { kernels: None, report };
            }
        };
        match device_facts(driver, ordinal) {
            Ok(facts) => {
                report.capability = facts.0;
                look_on(driver, ordinal, facts, wanted, embedded, report)
            }
            Err(error) => {
                report.steps.push((Source::Cpu, format!("device {ordinal}: {error}")));
                Loaded { kernels: None, report }
            }
        }
    }
}

/// Compute capability and most shared memory of a block.
fn device_facts(driver: &Driver, ordinal: u32) -> Result<(u32, u32), CudaError> {
    let device = driver.device(ordinal as i32)?;
    let major = driver.device_attribute(attribute::COMPUTE_CAPABILITY_MAJOR, device)?;
    let minor = driver.device_attribute(attribute::COMPUTE_CAPABILITY_MINOR, device)?;
    let shared = driver.device_attribute(attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)?;
    Ok(((10 * major + minor).unsigned_abs(), shared.unsigned_abs()))
}

fn look_on(
    driver: &'static Driver,
    ordinal: u32,
    facts: (u32, u32),
    wanted: Wanted,
    embedded: &[u8],
    mut report: Report,
) -> Loaded {
    let capability = facts.0;
    let mut attempt = |source, image: Result<(Vec<u8>, String), String>| {
        let loaded = image.and_then(|(image, note)| Ok((load_image(driver, ordinal, facts, &image)?, note)));
        match loaded {
            Ok(((kernels, entry), note)) => {
                report.steps.push((source, format!("{note}; {entry}")));
                report.chosen = source;
                Some(kernels)
            }
            Err(why) => {
                report.steps.push((source, why));
                None
            }
        }
    };
    let mut kernels = None;
    if capability < OLDEST {
        let why = format!("kernels need compute capability {OLDEST}, this device has {capability}");
        let _: Option<Kernels> = attempt(Source::CopyEngine, Err(why));
    } else {
        if matches!(wanted, Wanted::Auto | Wanted::Embedded) {
            kernels = attempt(Source::Embedded, Ok((embedded.to_vec(), "built in".to_owned())));
        }
        if kernels.is_none() && matches!(wanted, Wanted::Auto | Wanted::Nvrtc) {
            let image = Nvrtc::open().and_then(|nvrtc| compiled(&nvrtc, capability));
            kernels = attempt(Source::Nvrtc, image.map(|compiled| (compiled.image, compiled.note)));
        }
    }
    if kernels.is_none() {
        let why = match wanted {
            Wanted::Dma => format!("{} is dma", Wanted::VARIABLE),
            _ => "no kernels: a copy for each run".to_owned(),
        };
        report.steps.push((Source::CopyEngine, why));
        report.chosen = Source::CopyEngine;
    }
    Loaded { kernels, report }
}

/// Loads the first entry of the image that the driver takes.
fn load_image(
    driver: &'static Driver,
    ordinal: u32,
    (capability, shared_bytes): (u32, u32),
    image: &[u8],
) -> Result<(Kernels, String), String> {
    let image = Image::read(image).map_err(|error| error.to_string())?;
    let primary = Primary::retain(driver, ordinal as i32).map_err(|error| error.to_string())?;
    let entered = primary.enter().map_err(|error| error.to_string())?;
    let mut refused = Vec::new();
    let mut found = None;
    for entry in image.candidates(capability) {
        let name = entry_name(&entry);
        // SAFETY: an entry of a verified image: whole, and PTX with its zero byte (`Image::read`). What the driver
        // thinks of it is for the driver to say.
        match unsafe { driver.library_load(&aligned(entry.code)) } {
            Ok(library) => {
                found = Some((functions(driver, library, capability)?, name));
                break;
            }
            Err(error) => refused.push(format!("{name}: {error}")),
        }
    }
    let (functions, name) = found.ok_or_else(|| match refused.is_empty() {
        true => format!("nothing in the image runs on compute capability {capability}"),
        false => refused.join("; "),
    })?;
    let (copy, mixed, bulk, index_check) = functions;
    drop(entered);
    Ok((Kernels { driver, capability, shared_bytes, copy, mixed, bulk, index_check, primary }, name))
}

type Functions = ([Function; 5], Function, Option<Function>, Function);

fn functions(driver: &Driver, library: Library, capability: u32) -> Result<Functions, String> {
    let function = |name: &CStr| {
        // SAFETY: the library was loaded and is never unloaded.
        unsafe { driver.library_function(library, name) }
            .map_err(|error| format!("{}: {error}", name.to_string_lossy()))
    };
    let [v16, v8, v4, v2, v1] = COPY_NAMES.map(function);
    let bulk = match capability >= OLDEST_FOR_BULK {
        true => Some(function(c"hicache_segment_copy_bulk")?),
        false => None,
    };
    let (mixed, check) = (function(c"hicache_segment_copy_mixed")?, function(c"hicache_index_check")?);
    Ok(([v16?, v8?, v4?, v2?, v1?], mixed, bulk, check))
}

fn entry_name(entry: &Entry<'_>) -> String {
    match entry.kind {
        EntryKind::Cubin => format!("cubin sm_{}", entry.architecture),
        EntryKind::Ptx => format!("PTX compute_{}", entry.architecture),
        EntryKind::Fatbin => "fatbin".to_owned(),
    }
}

/// The same bytes at an address of a multiple of 8, as code has it in a file of its own.
fn aligned(code: &[u8]) -> AlignedCode {
    AlignedCode { words: code.chunks(8).map(word).collect(), len: code.len() }
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_ne_bytes(word)
}

struct AlignedCode {
    words: Vec<u64>,
    len: usize,
}

impl std::ops::Deref for AlignedCode {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes were put into these words, which cannot be moved while they are borrowed.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_takes_five_words() {
        for (word, wanted) in [("", Wanted::Auto), ("auto", Wanted::Auto), ("embedded", Wanted::Embedded)] {
            assert_eq!(Wanted::parse(word), Ok(wanted));
        }
        for (word, wanted) in [("nvrtc", Wanted::Nvrtc), ("dma", Wanted::Dma), ("off", Wanted::Off)] {
            assert_eq!(Wanted::parse(word), Ok(wanted));
        }
        assert!(Wanted::parse("Auto").unwrap_err().contains("found \"Auto\""));
    }

    #[test]
    fn off_asks_no_driver() {
        let loaded = Loaded::look(0, Wanted::Off, EMBEDDED);
        assert!(loaded.kernels.is_none());
        assert_eq!(loaded.report.chosen, Source::Cpu);
        assert_eq!(loaded.report.steps.len(), 1);
    }

    #[test]
    fn without_a_driver_the_cpu_is_chosen_and_the_report_says_why() {
        if Driver::get().is_ok() {
            return;
        }
        let loaded = Loaded::look(0, Wanted::Auto, EMBEDDED);
        assert_eq!(loaded.report.chosen, Source::Cpu);
        assert!(loaded.report.steps[0].1.contains("CUDA"), "{:?}", loaded.report);
    }

    #[test]
    fn code_is_aligned_and_unchanged() {
        for len in [0, 1, 7, 8, 9, 100] {
            let code: Vec<u8> = (0..len).collect();
            let copy = aligned(&code);
            assert_eq!((&copy[..], copy.as_ptr() as usize % 8), (&code[..], 0));
        }
    }
}
