//! A stream takes only plans that stay within what was lent to it, and holds that until the device is done.

use std::sync::Arc;

use hicache_sys::Region;
use hicache_sys::cuda::{
    Choice, DeviceMemory, IndexPlace, PlanDevice, PlanStream, SourceOrder, SubmitError, Touched, Wishes,
};
use hicache_sys::segment_plan::{
    IndexSlice, IndexVector, IndexWidth, PlanError, Segment, SegmentPlan, SegmentSide, Side, Strides,
};

use crate::build::scratch;
use crate::stub::run;

/// Says when it is let go.
struct Owner(&'static str);

impl Drop for Owner {
    fn drop(&mut self) {
        println!("released {}", self.0);
    }
}

fn memory(address: u64, len: u64, writable: bool, name: &'static str) -> Arc<DeviceMemory> {
    // SAFETY: the stub follows no address.
    let memory = unsafe { DeviceMemory::from_raw_parts(address, len, writable, Some(Box::new(Owner(name)))) };
    Arc::new(memory)
}

const FROM: u64 = 1 << 40;
const TO: u64 = 1 << 41;
const ROW: u32 = 1152;

fn plan(items: u32) -> SegmentPlan {
    let side =
        |base| SegmentSide::identity(base, Strides { page: ROW.into(), ..Strides::default() }, 1).unwrap();
    SegmentPlan::new(&[Segment::new(side(FROM), side(TO), items, 1, ROW).unwrap()]).unwrap()
}

fn touched(name: &'static str, destination_is_writable: bool) -> Arc<Touched> {
    let len = 64 * u64::from(ROW);
    let source = vec![memory(FROM, len, false, name)];
    let destination = vec![memory(TO, len, destination_is_writable, "destination")];
    Arc::new(Touched { source, destination, ..Touched::default() })
}

/// In a process of its own, see `stub`.
pub fn case() {
    let device = PlanDevice::new(0).unwrap();
    // SAFETY: the stub looks at no handle.
    let stream = unsafe { PlanStream::new(&device, 0x51, Wishes::default()) }.unwrap();
    println!("chosen: {:?}", device.report().chosen);
    let submit = |plan: &SegmentPlan, touched| stream.submit(&[*plan], &touched, IndexPlace::Device);

    // Refused, and nothing is launched: a row too many, memory for reading only, an error word that nobody lent.
    let error = submit(&plan(65), touched("refused", true)).unwrap_err();
    assert!(
        matches!(error, SubmitError::Plan(PlanError::OutsideExtents { side: Side::Source, .. })),
        "{error}"
    );
    let error = submit(&plan(64), touched("refused", false)).unwrap_err();
    assert!(
        matches!(error, SubmitError::Plan(PlanError::OutsideExtents { side: Side::Destination, .. })),
        "{error}"
    );
    let mut with_word = plan(64);
    with_word.error = 0xe770;
    let error = submit(&with_word, touched("refused", true)).unwrap_err();
    assert!(error.to_string().contains("error word"), "{error}");
    let len = u64::from(ROW) * 64;
    let lent = Touched {
        source: vec![memory(FROM, len, false, "with a word")],
        destination: vec![memory(TO, len, true, "destination")],
        error: Some(memory(0xe770, 4, true, "word")),
        ..Touched::default()
    };
    println!("launch with a word");
    submit(&with_word, Arc::new(lent)).unwrap();

    println!("launch first");
    let (choice, _) = stream.choose(&plan(64), false).unwrap();
    assert!(matches!(choice, Choice::Register { width: 16, .. }));
    submit(&plan(64), touched("first", true)).unwrap();
    println!("launch second");
    submit(&plan(64), touched("second", true)).unwrap();
    let done = format!("{}.done", std::env::var("STUB_LOG").unwrap());
    std::fs::write(&done, "").unwrap();
    println!("done; launch third");
    submit(&plan(64), touched("third", true)).unwrap();

    std::fs::remove_file(&done).unwrap();

    // Indices of this process go to the copy engine, whole or not at all.
    let mut index = [3_i64, 0, -1, 7];
    for past in [false, true] {
        index[1] = if past { 64 } else { 0 };
        let vector = IndexVector { address: index.as_ptr() as u64, width: IndexWidth::Eight };
        let strides = Strides { page: ROW.into(), ..Strides::default() };
        let from = SegmentSide::pages(FROM, strides, 1, 64, vector).unwrap();
        let to = SegmentSide::identity(TO, strides, 1).unwrap();
        let plan = SegmentPlan::new(&[Segment::new(from, to, 4, 1, ROW).unwrap()]).unwrap();
        let slices = [IndexSlice::Eight(&index)];
        let place = IndexPlace::Host(&slices, SourceOrder::Any);
        let submitted = stream.submit(&[plan], &touched("fourth", true), place);
        assert_eq!(submitted.err(), past.then_some(SubmitError::Index(1)));
    }

    // Registered memory has an address of its own on the device.
    let region = Arc::new(Region::owned(4096));
    let registered = device.reach(Arc::clone(&region)).unwrap();
    assert_eq!(registered.extent().base, region.address() as u64 + 0x100_0000);
    assert_eq!(registered.extent().len, 4096);
    drop(stream);
    println!("device dropped");
    drop(device);
    println!("end");
}

#[test]
fn a_stream_takes_what_was_lent_and_holds_it_until_the_device_is_done() {
    let cache = scratch("plan_stream");
    let run = run("plan_stream", &cache, &[]);
    assert!(run.printed.contains("chosen: Nvrtc"), "{}", run.printed);
    assert_eq!(run.lines("launch").len(), 4);
    assert_eq!(run.lines("batch"), ["batch 3 order 3 first 0x20000000000 0x10000000d80 1152 stream 0x51"]);
    let at =
        |words: &str| run.printed.find(words).unwrap_or_else(|| panic!("no {words:?} in {}", run.printed));
    // Held while the device is at work, though nobody else holds them; let go at the next submission after that.
    assert!(at("done; launch third") < at("released first"));
    assert!(at("released first") < at("released second"));
    assert!(at("released second") < at("device dropped"));
    // What is under way when the device goes is waited for by its events, whatever became of the stream, then let go.
    let end = at("device dropped");
    assert!(run.printed[end..].contains("released fourth"), "{}", run.printed);
    let calls: Vec<&str> =
        run.log.lines().filter(|line| !["push", "pop"].contains(&line.split(' ').next().unwrap())).collect();
    assert!(calls.last().unwrap().starts_with("synchronize event"), "{calls:?}");
}

/// In a process of its own: layers of several launches each.
pub fn layer() {
    let device = PlanDevice::new(0).unwrap();
    // SAFETY: the stub looks at no handle.
    let stream = |handle| unsafe { PlanStream::new(&device, handle, Wishes::default()) };
    let submit = |stream: &PlanStream, plans: &[SegmentPlan]| {
        stream.submit(plans, &touched("layer", true), IndexPlace::Device).map(drop)
    };
    let own = stream(0x51).unwrap();
    // One that is wrong, and none is launched.
    assert!(matches!(submit(&own, &[plan(64), plan(65)]), Err(SubmitError::Plan(_))));
    submit(&own, &[plan(64), plan(3), plan(1)]).unwrap();
    std::fs::write(format!("{}.done", std::env::var("STUB_LOG").unwrap()), "").unwrap();
    submit(&own, &[plan(64), plan(3)]).unwrap();

    let error = submit(&stream(0xcab).unwrap(), &[plan(1)]).unwrap_err();
    assert!(error.to_string().contains("captured"), "{error}");
    assert!(stream(2).unwrap_err().to_string().contains("PER_THREAD"));
    submit(&stream(1).unwrap(), &[plan(1)]).unwrap();
}

#[test]
fn the_launches_of_a_layer_share_one_event() {
    let cache = scratch("plan_layer");
    let run = run("plan_layer", &cache, &[]);
    let calls = run.log.lines().filter(|line| line.starts_with("launch") || line.starts_with("record"));
    let calls: Vec<String> = calls
        .map(|line| {
            let stream = line.split("stream ").nth(1).unwrap().split([':', ' ']).next().unwrap();
            format!("{} {stream}", line.split(' ').next().unwrap())
        })
        .collect();
    let expected = [
        "launch 0x51",
        "launch 0x51",
        "launch 0x51",
        "record 0x51",
        "launch 0x51",
        "launch 0x51",
        "record 0x51",
    ];
    assert_eq!(calls[..7], expected);
    // The stub prints no 0x for the default stream.
    assert_eq!(calls[7..], ["launch 0", "record 0"]);
    // What has come is used again.
    let events: std::collections::HashSet<&str> =
        run.lines("record").into_iter().map(|line| line.split(' ').nth(2).unwrap()).collect();
    assert_eq!(events.len(), 1, "{events:?}");
}
