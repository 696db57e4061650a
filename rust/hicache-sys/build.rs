//! Embeds compiled kernels where there is something to compile them with, and nothing otherwise: the library then
//! compiles them at first use, or does without. It never fails for want of CUDA, unless asked to.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `HICACHE_CUDA_IMAGE=FILE` | embed this image, made by `cuda/build_image.py` |
//! | `HICACHE_CUDA=0` | embed nothing |
//! | `HICACHE_CUDA=1` | fail where nothing can be embedded |
//! | `NVCC`, `CUDA_HOME`, `CUDA_PATH`, `PATH` | where nvcc is looked for; of `PATH` a change is not noticed |

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

#[path = "src/cuda/hash.rs"]
mod hash;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The kernels' sources; the list and order of `SOURCES` in `src/cuda/image.rs`.
const SOURCES: [&str; 5] =
    ["segment_copy.cu", "leaf.h", "segment_bulk.h", "segment_plan.h", "segment_walk.h"];

/// What nvcc makes: cubins that serve all devices from 8.0 on by their major version, and PTX for those to come.
const TARGETS: [(&str, &str); 6] = [
    ("compute_80", "sm_80"),
    ("compute_90", "sm_90"),
    ("compute_100", "sm_100"),
    ("compute_120", "sm_120"),
    ("compute_80", "compute_80"),
    ("compute_90", "compute_90"),
];

fn main() -> Result<()> {
    // Not PATH, although nvcc is looked for there: it differs between environments that share compiled crates, and each
    // change would build everything anew. After nvcc was installed, set NVCC or CUDA_HOME.
    for variable in ["HICACHE_CUDA", "HICACHE_CUDA_IMAGE", "NVCC", "CUDA_HOME", "CUDA_PATH"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/cuda/hash.rs");
    let sources = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../../cuda");
    for source in SOURCES {
        println!("cargo:rerun-if-changed={}", sources.join(source).display());
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let wanted = env::var("HICACHE_CUDA").unwrap_or_default();
    let image = match (wanted.as_str(), env::var_os("HICACHE_CUDA_IMAGE")) {
        ("0", _) => Vec::new(),
        (_, Some(file)) => {
            println!("cargo:rerun-if-changed={}", Path::new(&file).display());
            fs::read(&file)
                .map_err(|error| format!("HICACHE_CUDA_IMAGE={}: {error}", Path::new(&file).display()))?
        }
        _ => match compile(&sources, &out) {
            Ok(image) => image,
            Err(error) if wanted == "1" => return Err(format!("HICACHE_CUDA is 1: {error}").into()),
            Err(Missing::Compiler) => Vec::new(),
            Err(error @ Missing::Image(_)) => {
                println!("cargo:warning={error}; the library will compile its kernels at first use");
                Vec::new()
            }
        },
    };
    fs::write(out.join("kernels.image"), image)?;
    Ok(())
}

#[derive(Debug)]
enum Missing {
    Compiler,
    Image(String),
}

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Missing::Compiler => {
                f.write_str("no nvcc in NVCC, CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda")
            }
            Missing::Image(why) => f.write_str(why),
        }
    }
}

/// A fatbin as an image of one entry.
fn compile(sources: &Path, out: &Path) -> std::result::Result<Vec<u8>, Missing> {
    let nvcc = find_nvcc().ok_or(Missing::Compiler)?;
    let fatbin = out.join("kernels.fatbin");
    let mut command = Command::new(&nvcc);
    command.args(["-std=c++17", "-O3", "-fatbin"]);
    for (architecture, code) in TARGETS {
        command.args(["-gencode", &format!("arch={architecture},code={code}")]);
    }
    let failed = |why: String| Missing::Image(format!("{}: {why}", nvcc.display()));
    let run = command.arg(sources.join(SOURCES[0])).arg("-o").arg(&fatbin).output();
    let run = run.map_err(|error| failed(error.to_string()))?;
    if !run.status.success() {
        return Err(failed(String::from_utf8_lossy(&run.stderr).replace('\n', " ")));
    }
    let code = fs::read(&fatbin).map_err(|error| failed(error.to_string()))?;
    archive(sources, &code).map_err(|error| failed(error.to_string()))
}

/// The archive that `src/cuda/image.rs` describes and reads.
fn archive(sources: &Path, fatbin: &[u8]) -> Result<Vec<u8>> {
    const HEADER_AND_ENTRY: u64 = 32 + 24;
    let texts: Vec<_> =
        SOURCES.iter().map(|name| fs::read_to_string(sources.join(name))).collect::<std::io::Result<_>>()?;
    let source_hash = hash::hash_sources(SOURCES.into_iter().zip(texts.iter().map(String::as_str)));
    let abi = abi(&texts[3]).ok_or("no SEGMENT_PLAN_ABI in segment_plan.h")?;
    let mut body = Vec::new();
    body.extend(3_u32.to_le_bytes());
    body.extend(0_u32.to_le_bytes());
    body.extend(HEADER_AND_ENTRY.to_le_bytes());
    body.extend((fatbin.len() as u64).to_le_bytes());
    body.extend(fatbin);
    let mut image = b"HCKERNEL".to_vec();
    image.extend(abi.to_le_bytes());
    let count = 1_u32.to_le_bytes();
    image.extend(count);
    image.extend(source_hash.to_le_bytes());
    image.extend(hash::hash_more(hash::hash_more(hash::HASH_START, &count), &body).to_le_bytes());
    image.extend(body);
    Ok(image)
}

fn abi(header: &str) -> Option<u32> {
    let rest = header.split_once("#define SEGMENT_PLAN_ABI ")?.1;
    rest.split_once('u')?.0.parse().ok()
}

fn find_nvcc() -> Option<PathBuf> {
    let named = env::var_os("NVCC").filter(|name| !name.is_empty()).map(PathBuf::from);
    let homes = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(env::var_os)
        .map(|home| Path::new(&home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let of_path = env::split_paths(&path).flat_map(|folder| {
        let packaged = packaged_nvcc(&folder);
        [Some(folder.join("nvcc")), packaged].into_iter().flatten()
    });
    let installed = PathBuf::from("/usr/local/cuda/bin/nvcc");
    let of_homes = homes.map(|folder| folder.join("nvcc"));
    named.into_iter().chain(of_homes).chain(of_path).chain([installed]).find(|file| file.is_file())
}

/// Where the packages of the extra `cuda-build` put it, in the environment whose programs are in `folder`.
fn packaged_nvcc(folder: &Path) -> Option<PathBuf> {
    let libraries = folder.parent()?.join("lib").read_dir().ok()?;
    libraries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| entry.path().join("site-packages/nvidia/cu13/bin/nvcc"))
        .find(|file| file.is_file())
}
