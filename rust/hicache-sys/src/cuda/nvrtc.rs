//! Kernels compiled at first use by NVRTC, the compiler library that comes with every CUDA build of torch, and kept on
//! disk.
//!
//! The library is looked for where it is already mapped, then where `HICACHE_NVRTC` points, then beside this package
//! among the installed ones, then by its name. Its part with the built-in functions is loaded first, by path: the
//! library itself looks for it by name only, and does not find it in a package.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use super::image::SOURCES;

/// Options besides the architecture; part of the cache's key.
pub(crate) const OPTIONS: [&CStr; 2] = [c"--std=c++17", c"-default-device"];

/// Names of the library, newest first.
const SONAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];

type Program = *mut c_void;
type Texts = *const *const c_char;

/// An opened NVRTC.
pub(crate) struct Nvrtc {
    /// Major and minor.
    pub version: (i32, i32),
    /// Where it was found.
    pub path: String,
    create: unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Texts, Texts) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, Texts) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
}

/// An entry of an opened library, by name.
macro_rules! entry {
    ($library:expr, $name:literal, $kind:ty) => {{
        // SAFETY: a library that is never closed, and a terminated name.
        let address = unsafe { libc::dlsym($library, $name.as_ptr()) };
        // SAFETY: null, or NVRTC's entry of this name, whose type has not changed since CUDA 11.2.
        unsafe { std::mem::transmute::<*mut c_void, Option<$kind>>(address) }
            .ok_or_else(|| format!("NVRTC has no {}", $name.to_string_lossy()))
    }};
}

impl Nvrtc {
    /// Opens NVRTC, or says in words why there is none.
    pub fn open() -> Result<Nvrtc, String> {
        let mut tried = Vec::new();
        for path in places() {
            if path.parent().is_some_and(|folder| !folder.as_os_str().is_empty()) {
                if !path.exists() {
                    continue;
                }
                load_builtins(&path);
            }
            match open_library(&path, libc::RTLD_NOW | libc::RTLD_LOCAL) {
                Ok(library) => return Nvrtc::of(library, &path),
                Err(error) => tried.push(error),
            }
        }
        Err(format!("no NVRTC: {}", tried.join("; ")))
    }

    fn of(library: *mut c_void, path: &Path) -> Result<Nvrtc, String> {
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        type Create =
            unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Texts, Texts) -> c_int;
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
        let ask_version = entry!(library, c"nvrtcVersion", Version)?;
        let mut version = (0, 0);
        // SAFETY: writes two integers.
        let code = unsafe { ask_version(&raw mut version.0, &raw mut version.1) };
        if code != 0 {
            return Err(format!("nvrtcVersion: code {code}"));
        }
        Ok(Nvrtc {
            version,
            path: path.display().to_string(),
            create: entry!(library, c"nvrtcCreateProgram", Create)?,
            compile: entry!(
                library,
                c"nvrtcCompileProgram",
                unsafe extern "C" fn(Program, c_int, Texts) -> c_int
            )?,
            cubin_size: entry!(library, c"nvrtcGetCUBINSize", Size)?,
            cubin: entry!(library, c"nvrtcGetCUBIN", Text)?,
            log_size: entry!(library, c"nvrtcGetProgramLogSize", Size)?,
            log: entry!(library, c"nvrtcGetProgramLog", Text)?,
            destroy: entry!(library, c"nvrtcDestroyProgram", unsafe extern "C" fn(*mut Program) -> c_int)?,
        })
    }

    /// Compiles the kernels for one architecture (10 x major + minor) into a cubin.
    pub fn compile(&self, architecture: u32) -> Result<Vec<u8>, String> {
        let texts = SOURCES.map(|(name, text)| (c_text(name), c_text(text)));
        let ((name, text), headers) = texts.split_first().ok_or("no sources")?;
        let header_names: Vec<_> = headers.iter().map(|header| header.0.as_ptr()).collect();
        let header_texts: Vec<_> = headers.iter().map(|header| header.1.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        let (count, names) = (headers.len() as c_int, header_names.as_ptr());
        // SAFETY: terminated texts, and arrays of `count` of them, all alive until the program is destroyed.
        let code = unsafe {
            (self.create)(&raw mut program, text.as_ptr(), name.as_ptr(), count, header_texts.as_ptr(), names)
        };
        if code != 0 {
            return Err(format!("nvrtcCreateProgram: code {code}"));
        }
        let result = self.compile_program(program, architecture);
        // SAFETY: a program made above, destroyed once.
        unsafe { (self.destroy)(&raw mut program) };
        result
    }

    fn compile_program(&self, program: Program, architecture: u32) -> Result<Vec<u8>, String> {
        let target = c_text(&format!("--gpu-architecture=sm_{architecture}"));
        let options = [target.as_ptr(), OPTIONS[0].as_ptr(), OPTIONS[1].as_ptr()];
        // SAFETY: a live program and an array of terminated texts.
        let code = unsafe { (self.compile)(program, options.len() as c_int, options.as_ptr()) };
        if code != 0 {
            let log = self.bytes(program, self.log_size, self.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
            return Err(format!("nvrtcCompileProgram for sm_{architecture}: code {code}: {log}"));
        }
        self.bytes(program, self.cubin_size, self.cubin)
    }

    fn bytes(
        &self,
        program: Program,
        ask_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        fill: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, String> {
        let mut size = 0;
        // SAFETY: a live program; writes one integer.
        let code = unsafe { ask_size(program, &raw mut size) };
        let mut bytes = vec![0; size];
        // SAFETY: a live program; writes as many bytes as it has said.
        let filled = unsafe { fill(program, bytes.as_mut_ptr().cast()) };
        if code == 0 && filled == 0 { Ok(bytes) } else { Err(format!("NVRTC: codes {code} and {filled}")) }
    }
}

fn c_text(text: &str) -> CString {
    // Sources and names have no zero bytes; a test of the sources would not compile with one.
    CString::new(text).unwrap_or_default()
}

/// Where NVRTC may be, best first.
fn places() -> Vec<PathBuf> {
    let mut places = mapped();
    places.extend(std::env::var_os("HICACHE_NVRTC").map(PathBuf::from));
    // Beside this package: site-packages/hicache_store/_hicache_store.abi3.so.
    if let Some(packages) = own_file().as_deref().and_then(Path::parent).and_then(Path::parent) {
        places.push(packages.join("nvidia/cu13/lib/libnvrtc.so.13"));
        places.push(packages.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12"));
    }
    places.extend(SONAMES.map(PathBuf::from));
    places
}

/// Files of this process with the library's name: torch has loaded it, or will use the same.
fn mapped() -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut found: Vec<PathBuf> = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])))
        .filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so."))
        })
        .collect();
    found.dedup();
    found
}

/// The file that this code was loaded from.
fn own_file() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let here = own_file as *const () as usize;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (first, end) = range.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        let inside = (number(first)?..number(end)?).contains(&here);
        inside.then(|| rest.find('/').map(|at| PathBuf::from(&rest[at..])))?
    })
}

fn load_builtins(nvrtc: &Path) {
    let files = nvrtc.parent().and_then(|folder| folder.read_dir().ok());
    for file in files.into_iter().flatten().flatten() {
        if file.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.") {
            // What fails here is told by the compiler when it misses it.
            let _ = open_library(&file.path(), libc::RTLD_NOW | libc::RTLD_GLOBAL);
        }
    }
}

/// Opens a library and never closes it.
fn open_library(path: &Path, flags: c_int) -> Result<*mut c_void, String> {
    let name = c_text(&path.to_string_lossy());
    // SAFETY: a terminated name; the initialisers of NVRTC run, as in every program that uses it.
    let library = unsafe { libc::dlopen(name.as_ptr(), flags) };
    if !library.is_null() {
        return Ok(library);
    }
    // SAFETY: takes nothing; the text is this thread's, and stays until its next call of the loader.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return Err(format!("{} cannot be opened", path.display()));
    }
    // SAFETY: not null, hence a terminated string, copied at once.
    Err(unsafe { CStr::from_ptr(text) }.to_string_lossy().replace('\n', " "))
}
