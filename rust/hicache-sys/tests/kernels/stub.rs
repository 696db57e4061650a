//! Loading and launching against stubs of the driver and of NVRTC. Each case runs in a process of its own, which finds
//! the stub as its driver; what it did is in the stub's log, what it found is on its standard output.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use hicache_sys::cuda::{
    Choice, Driver, Entry, EntryKind, Event, Facts, Kernels, Loaded, SourceOrder, Stream, Wanted, Way,
    Wishes, choose, write_image,
};
use hicache_sys::segment_plan::{
    IndexSlice, IndexVector, IndexWidth, Segment, SegmentPlan, SegmentSide, Strides, copies_of,
};

use crate::build::{cuda, scratch, shared_library};

const CASE: &str = "HICACHE_STUB_CASE";

/// The folder of both stubs. Panics without a C compiler, which building this needs anyway.
fn stubs() -> &'static Path {
    static STUBS: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        let folder = scratch("stubs");
        let source = |name| vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels").join(name)];
        let include = format!("-I{}", cuda().display());
        let both = shared_library("cc", &[&include], &source("stub_libcuda.c"), &folder.join("libcuda.so.1"))
            && shared_library("cc", &[], &source("stub_nvrtc.c"), &folder.join("libstub_nvrtc.so"));
        assert!(both, "a C compiler named cc is needed, as scripts/check-prerequisites.sh says");
        folder
    };
    STUBS.get_or_init(build)
}

/// A run of one case: what it printed, and the log of the stubs.
pub struct Run {
    pub printed: String,
    pub log: String,
}

impl Run {
    pub fn lines<'a>(&'a self, first_word: &'a str) -> Vec<&'a str> {
        self.log.lines().filter(|line| line.split(' ').next() == Some(first_word)).collect()
    }
}

/// Starts `case` with some variables set, over a cache folder.
fn start(case: &str, cache: &Path, variables: &[(&str, &str)]) -> (std::process::Child, PathBuf) {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let stubs = stubs();
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let log = stubs.join(format!("log-{number}"));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "stub::a_case_in_its_own_process", "--nocapture", "--test-threads=1"])
        .envs([(CASE, case.as_ref()), ("STUB_LOG", log.as_os_str()), ("LD_LIBRARY_PATH", stubs.as_os_str())])
        .env("HICACHE_CACHE_DIR", cache)
        .env("HICACHE_NVRTC", stubs.join("libstub_nvrtc.so"))
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    (command.spawn().unwrap(), log)
}

fn finish((child, log): (std::process::Child, PathBuf)) -> Run {
    let output = child.wait_with_output().unwrap();
    let (printed, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}{said}");
    Run { printed: printed.into_owned(), log: fs::read_to_string(log).unwrap_or_default() }
}

/// One run, always there.
pub fn run(case: &str, cache: &Path, variables: &[(&str, &str)]) -> Run {
    finish(start(case, cache, variables))
}

/// Not a test by itself: what the tests below start.
#[test]
fn a_case_in_its_own_process() {
    match std::env::var(CASE).as_deref() {
        Ok("look") => {
            look();
        }
        Ok("launch") => launch(),
        Ok("layers") => layers(),
        Ok("copies") => copies(),
        Ok("plan_stream") => crate::plan_stream::case(),
        Ok("plan_layer") => crate::plan_stream::layer(),
        _ => {}
    }
}

/// An image with entries of the names that the stub logs.
fn image() -> Vec<u8> {
    let entry = |kind, architecture, code| Entry { kind, architecture, code };
    write_image(&[
        entry(EntryKind::Cubin, 80, b"cubin80".as_slice()),
        entry(EntryKind::Cubin, 90, b"Cubin90"),
        entry(EntryKind::Ptx, 80, b"ptx80\0"),
    ])
}

fn look() -> Loaded {
    let mut image = image();
    if let Ok(byte) = std::env::var("STUB_SPOIL") {
        image[byte.parse::<usize>().unwrap()] ^= 1;
    }
    let loaded = Loaded::look(0, Wanted::from_environment().unwrap(), &image);
    println!("chosen: {:?}", loaded.report.chosen);
    for (source, outcome) in &loaded.report.steps {
        println!("step {source:?}: {outcome}");
    }
    loaded
}

fn plan(runs: &[u32]) -> SegmentPlan {
    let segments: Vec<_> = (0_u64..)
        .zip(runs)
        .map(|(number, &run)| {
            let strides = Strides { page: run.into(), ..Strides::default() };
            let side = |base| SegmentSide::identity(base + (number << 30), strides, 1).unwrap();
            Segment::new(side(1 << 40), side(1 << 41), 8192, 1, run).unwrap()
        })
        .collect();
    let mut plan = SegmentPlan::new(&segments).unwrap();
    plan.error = 0xe770;
    plan
}

fn stream(handle: u64) -> Stream {
    // SAFETY: the stub looks at no handle.
    unsafe { Stream::from_raw(handle) }
}

fn launch_one(kernels: &Kernels, plan: &SegmentPlan, way: Option<Way>, stream: Stream) -> Choice {
    let facts = Facts::of(Driver::get().unwrap(), Some(kernels), stream, false).unwrap();
    let (choice, _) = choose(plan, &facts, &Wishes { way, blocks: None }).unwrap();
    // SAFETY: the stub reads the plan and follows no address.
    unsafe { kernels.copy(plan, choice, stream) }.unwrap();
    choice
}

fn launch() {
    let loaded = look();
    let kernels = loaded.kernels.unwrap();
    launch_one(&kernels, &plan(&[1152]), None, stream(0x51));
    launch_one(&kernels, &plan(&[1152, 132]), None, stream(0xcab));
    launch_one(&kernels, &plan(&[256]), None, stream(0));
    if std::env::var_os("STUB_VERSION").is_none() {
        launch_one(&kernels, &plan(&[656]), Some(Way::Bulk), stream(0x51));
    }
    let index = IndexVector { address: 0xabc0, width: IndexWidth::Four };
    // SAFETY: the stub follows no address.
    unsafe { kernels.check_index(index, 77, 1000, 0x5ee0, 0x4e90, stream(0x52)) }.unwrap();
    // SAFETY: nothing is launched.
    let error = unsafe { kernels.copy(&plan(&[16]), Choice::Copies { batched: true }, stream(1)) };
    assert!(error.unwrap_err().to_string().contains("copy engine"));
}

/// Three layers as a restore gives them to its stream: each after the rows are there, each with an event behind it.
fn layers() {
    let kernels = look().kernels.unwrap();
    let driver = Driver::get().unwrap();
    let (rows_there, stream) = (Event::new(driver).unwrap(), stream(0x51));
    stream.wait(&rows_there).unwrap();
    let done: Vec<_> = (0..3).map(|_| Event::new(driver).unwrap()).collect();
    for event in &done {
        launch_one(&kernels, &plan(&[1152, 128]), None, stream);
        event.record(stream).unwrap();
    }
}

fn copies() {
    let loaded = look();
    assert!(loaded.kernels.is_none());
    let index: Vec<i64> = vec![3, 4, 1, -1, 0, 9];
    let vector = IndexVector { address: index.as_ptr() as u64, width: IndexWidth::Eight };
    let strides = Strides { page: 0x1000, ..Strides::default() };
    let from = SegmentSide::pages(1 << 40, strides, 1, 8, vector).unwrap();
    let to = SegmentSide::identity(1 << 41, strides, 1).unwrap();
    let plan = SegmentPlan::new(&[Segment::new(from, to, 6, 1, 0x1000).unwrap()]).unwrap();
    let mut list = vec![];
    assert_eq!(copies_of(&plan, &[IndexSlice::Eight(&index)], &mut list), Ok(1));
    // Pages 3 and 4 are neighbours on both sides; -1 is padding and 9 past the limit.
    let at = |from: u64, to: u64, pages: usize| {
        ((1 << 41) + to * 0x1000, (1 << 40) + from * 0x1000, pages * 0x1000)
    };
    assert_eq!(list, [at(3, 0, 2), at(1, 2, 1), at(0, 4, 1)]);
    let driver = Driver::get().unwrap();
    for handle in [0x51, 0] {
        let facts = Facts::of(driver, None, stream(handle), true).unwrap();
        let Ok((Choice::Copies { batched }, _)) = choose(&plan, &facts, &Wishes::default()) else { panic!() };
        // SAFETY: the stub follows no address.
        unsafe { driver.copy_runs(&list, batched, stream(handle), SourceOrder::Stream) }.unwrap();
    }
}

#[test]
fn kernels_are_launched_with_what_was_chosen() {
    let cache = scratch("launch");
    let run = run("launch", &cache, &[]);
    assert!(run.printed.contains("chosen: Embedded"), "{}", run.printed);
    assert_eq!(run.lines("library"), ["library Cubin90"]);
    let plan = |segments: u32, run, lanes| {
        format!("abi 1 segments {segments} error 0xe770 last run {run} lanes {lanes}")
    };
    let launch = |name: &str, grid, shared, stream: &str, what: String| {
        let block = if name.ends_with("bulk") { 32 } else { 1024 };
        let name = format!("hicache_{name}");
        format!("launch {name} grid {grid} 1 1 block {block} 1 1 shared {shared} stream {stream}: {what}")
    };
    let want = [
        launch("segment_copy_v16", 2, 0, "0x51", plan(1, 1152, 16)),
        // An odd sidecar is no second launch.
        launch("segment_copy_mixed", 4, 0, "0xcab", plan(2, 132, 8)),
        launch("segment_copy_v16", 4, 0, "0", plan(1, 256, 4)),
        launch("segment_copy_bulk", 2, 98304, "0x51", plan(1, 656, 8) + " shape 32 768"),
        launch("index_check", 1, 0, "0x52", "0xabc0 4 77 1000 0x5ee0 0x4e90".to_owned()),
    ];
    assert_eq!(run.lines("launch"), want);
    assert_eq!(run.lines("attribute"), ["attribute hicache_segment_copy_bulk 8 98304 device 0"]);
    assert!(!run.log.contains("misaligned"));
}

#[test]
fn each_layer_is_one_launch_between_its_wait_and_its_event() {
    let cache = scratch("layers");
    let run = run("layers", &cache, &[]);
    let order: Vec<_> = run.log.lines().filter(|line| !line.starts_with("library")).collect();
    let order: Vec<_> = order.iter().map(|line| line.split(" grid").next().unwrap()).collect();
    let launch = "launch hicache_segment_copy_v16";
    let record = |event| format!("record event {event} stream 0x51");
    let (one, two, three) = (record("0xe1"), record("0xe2"), record("0xe3"));
    let want =
        ["push 0xc0", "pop", "wait stream 0x51 event 0xe0", launch, &one, launch, &two, launch, &three];
    assert_eq!(order, want);
}

#[test]
fn a_stale_image_is_refused_and_the_kernels_are_compiled() {
    for (byte, word) in [("8", "expected ABI"), ("16", "expected source hash"), ("60", "damaged")] {
        let cache = scratch("stale");
        let run = run("look", &cache, &[("STUB_SPOIL", byte)]);
        assert!(
            run.printed.contains(&format!("step Embedded: stale image of kernels: {word}")) || byte == "60"
        );
        assert!(run.printed.contains(word), "{}", run.printed);
        assert!(run.printed.contains("chosen: Nvrtc"), "{}", run.printed);
        assert_eq!(run.lines("library"), ["library compiled"]);
    }
}

#[test]
fn an_image_that_the_driver_refuses_falls_through_in_order() {
    let cache = scratch("refused");
    let cubin = run("look", &cache, &[("STUB_REFUSE", "C")]);
    assert_eq!(cubin.lines("library"), ["library Cubin90 refused", "library ptx80"]);
    assert!(cubin.printed.contains("chosen: Embedded") && cubin.printed.contains("PTX compute_80"));
    let all = run("look", &cache, &[("STUB_REFUSE", "Cp")]);
    assert_eq!(
        all.lines("library"),
        ["library Cubin90 refused", "library ptx80 refused", "library compiled"]
    );
    assert!(all.printed.contains("step Embedded: cubin sm_90: cuLibraryLoadData"), "{}", all.printed);
    let none = run("look", &cache, &[("STUB_REFUSE", "Cpc")]);
    assert!(none.printed.contains("chosen: CopyEngine"), "{}", none.printed);
    let fails = [("STUB_REFUSE", "Cp"), ("STUB_COMPILE_FAILS", "1")];
    let fails = run("look", &scratch("fails"), &fails);
    assert!(
        fails.printed.contains("chosen: CopyEngine") && fails.printed.contains("line 7 !"),
        "{}",
        fails.printed
    );
}

#[test]
fn the_environment_decides_and_the_report_says_so() {
    let cache = scratch("wanted");
    for (wanted, chosen, loads) in
        [("embedded", "Embedded", 1), ("nvrtc", "Nvrtc", 1), ("dma", "CopyEngine", 0), ("off", "Cpu", 0)]
    {
        let run = run("look", &cache, &[("HICACHE_CUDA_KERNELS", wanted)]);
        assert!(run.printed.contains(&format!("chosen: {chosen}")), "{wanted}: {}", run.printed);
        assert_eq!(run.lines("library").len(), loads, "{wanted}");
        assert!(run.printed.contains("step"), "{wanted}: silent");
    }
    let embedded = [("HICACHE_CUDA_KERNELS", "embedded"), ("STUB_REFUSE", "Cp")];
    let run = run("look", &cache, &embedded);
    assert!(run.printed.contains("chosen: CopyEngine") && run.lines("compile").is_empty());
}

#[test]
fn a_device_too_old_gets_the_copy_engine() {
    let cache = scratch("old");
    let run = run("look", &cache, &[("STUB_CAPABILITY", "75")]);
    assert!(
        run.printed.contains("chosen: CopyEngine") && run.printed.contains("capability 80"),
        "{}",
        run.printed
    );
    assert!(run.lines("library").is_empty() && run.lines("compile").is_empty());
}

#[test]
fn an_old_driver_loads_modules() {
    let cache = scratch("module");
    let run = run("launch", &cache, &[("STUB_VERSION", "11080")]);
    assert_eq!(run.lines("module"), ["module Cubin90"]);
    assert!(run.lines("library").is_empty());
    // A module belongs to a context: one is current while it loads.
    let order: Vec<_> = run.log.lines().take(3).collect();
    assert_eq!(order, ["push 0xc0", "module Cubin90", "pop"]);
    assert_eq!(run.lines("launch").len(), 4);
}

#[test]
fn without_kernels_the_copy_engine_gets_the_merged_runs() {
    let cache = scratch("copies");
    let run = run("copies", &cache, &[("HICACHE_CUDA_KERNELS", "dma")]);
    assert_eq!(run.lines("batch"), ["batch 3 order 1 first 0x20000000000 0x10000003000 8192 stream 0x51"]);
    // The legacy default stream takes no batches.
    assert_eq!(run.lines("copy").len(), 3);
    assert_eq!(run.lines("copy")[0], "copy 0x20000000000 0x10000003000 8192 stream 0");
}

#[test]
fn what_was_compiled_is_kept_and_verified() {
    let cache = scratch("cache");
    let wanted = [("HICACHE_CUDA_KERNELS", "nvrtc")];
    let cold = run("look", &cache, &wanted);
    let compile = "compile segment_copy.cu --gpu-architecture=sm_90 --std=c++17 -default-device";
    assert_eq!(cold.lines("compile"), [compile]);
    let files = || -> Vec<PathBuf> {
        let mut files: Vec<_> =
            fs::read_dir(cache.join("kernels")).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    };
    assert_eq!(files().len(), 1, "{:?}", files());
    let warm = run("look", &cache, &wanted);
    assert!(warm.lines("compile").is_empty() && warm.printed.contains("read from"), "{}", warm.printed);

    // A byte changed, the file cut short, and emptied: compiled again, and whole again afterwards.
    let whole = fs::read(&files()[0]).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for damaged in [&flipped[..], &whole[..whole.len() - 1], &[]] {
        fs::write(&files()[0], damaged).unwrap();
        let run = run("look", &cache, &wanted);
        assert_eq!(run.lines("compile").len(), 1);
        assert!(
            run.printed.contains("is not used") && run.printed.contains("chosen: Nvrtc"),
            "{}",
            run.printed
        );
        assert!(fs::read(&files()[0]).unwrap() == whole);
    }

    // Another device has a file of its own.
    let other = run("look", &cache, &[("HICACHE_CUDA_KERNELS", "nvrtc"), ("STUB_CAPABILITY", "100")]);
    assert!(other.lines("compile")[0].contains("sm_100"));
    assert_eq!(files().len(), 2);
}

#[test]
fn a_cache_that_cannot_be_written_costs_a_compilation_and_nothing_else() {
    // A file where the folder should be: even root cannot write there.
    let cache = scratch("unwritable").join("file");
    fs::write(&cache, "").unwrap();
    for _ in 0..2 {
        let run = run("look", &cache, &[("HICACHE_CUDA_KERNELS", "nvrtc")]);
        assert!(run.printed.contains("not kept") && run.printed.contains("chosen: Nvrtc"), "{}", run.printed);
        assert_eq!(run.lines("compile").len(), 1);
    }
}

/// Only where `HICACHE_CUDA_PACKAGES` names the folder of the compiler's packages, as `make test-kernels` does.
#[test]
fn the_real_compiler_makes_code_for_the_device() {
    let Ok(packages) = std::env::var("HICACHE_CUDA_PACKAGES") else { return };
    for library in ["cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12"] {
        let cache = scratch("real");
        let library = format!("{packages}/nvidia/{library}");
        let real = [("HICACHE_CUDA_KERNELS", "nvrtc"), ("HICACHE_NVRTC", &library)];
        let run = run("look", &cache, &real);
        assert!(run.printed.contains("chosen: Nvrtc"), "{}", run.printed);
        assert!(run.log.contains("library \u{7f}ELF"), "{}", run.log);
        let file = fs::read_dir(cache.join("kernels")).unwrap().next().unwrap().unwrap().path();
        assert!(fs::metadata(file).unwrap().len() > 50_000);
    }
}

#[test]
fn processes_that_start_at_once_all_get_their_kernels() {
    let cache = scratch("race");
    let started: Vec<_> =
        (0..6).map(|_| start("look", &cache, &[("HICACHE_CUDA_KERNELS", "nvrtc")])).collect();
    for child in started {
        let run = finish(child);
        assert!(run.printed.contains("chosen: Nvrtc"), "{}", run.printed);
    }
    assert_eq!(fs::read_dir(cache.join("kernels")).unwrap().count(), 1, "something was left behind");
    let warm = run("look", &cache, &[("HICACHE_CUDA_KERNELS", "nvrtc")]);
    assert!(warm.lines("compile").is_empty());
}
