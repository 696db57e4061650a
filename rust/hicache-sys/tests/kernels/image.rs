//! An image written by `cuda/build_image.py` is one that the library reads: same hashes, same order, same numbers.

use std::process::Command;

use hicache_sys::cuda::{Entry, EntryKind, Image, source_hash, write_image};

use crate::build::{cuda, scratch};

#[test]
fn what_python_writes_is_read() {
    let out = scratch("image").join("kernels.image");
    let program = "import sys, pathlib\n\
        sys.dont_write_bytecode = True\n\
        sys.path.insert(0, sys.argv[1])\n\
        import build_image as b\n\
        entries = [(b.CUBIN, 90, b'cubin'), (b.PTX, 80, b'.version\\0')]\n\
        pathlib.Path(sys.argv[2]).write_bytes(b.write_image(entries))\n\
        print(b.source_hash())";
    let run = Command::new("python3").args(["-c", program]).arg(cuda()).arg(&out).output();
    let run = match run {
        Ok(run) => run,
        Err(error) => return eprintln!("left out: python3: {error}"),
    };
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert_eq!(String::from_utf8_lossy(&run.stdout).trim(), source_hash().to_string());
    let bytes = std::fs::read(out).unwrap();
    let entry = |kind, architecture, code| Entry { kind, architecture, code };
    let entries =
        [entry(EntryKind::Cubin, 90, b"cubin".as_slice()), entry(EntryKind::Ptx, 80, b".version\0")];
    assert_eq!(Image::read(&bytes).unwrap().entries(), entries);
    assert_eq!(bytes, write_image(&entries));
}
