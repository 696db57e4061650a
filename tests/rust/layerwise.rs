//! Restores layer by layer are exact, whole or a miss, and keep their four orders: load, ready, slot reuse, loaded.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::plans::{copy_rows, pattern};
use crate::support::{fast_folder, flip, hooked, keys, objects, open};
use crate::transfer::{contents, regions};
use hicache_core::store::counters::Counter;
use hicache_core::transfer::{
    Announce, Completion, CpuCopies, Edge, Edges, Event, Executor, HostEvent, HostStream, LayerPlan,
    LayerwiseBackup, LayerwiseRestore, LayerwiseTicket, Memory, Placed, Reading, Slots, TransferBackup,
    TransferPlan, TransferPool, TransferRestore,
};
use hicache_core::{
    BackupOptions, Bounce, ChainStart, Component, DType, ErrorKind, Layout, LayoutName, Namespace, PageKey,
    Pool, PoolKind, PoolMemory, RestoreOptions, RestoreOutcome, RowUnit, Span, Store, StoreOptions, Tile,
    View, ViewOptions, ViewPool,
};
use hicache_sys::Region;

const LAYERS: u32 = 4;
const TOKENS: u32 = 4;
const CANARY: u8 = 0xa5;

/// A deployment of two pools on one rank: keys and values, and an indexer with a row for each page.
struct World {
    _root: tempfile::TempDir,
    store: Store,
    view: Arc<View>,
    plan: Arc<TransferPlan>,
    /// Of each pool the host memory, the device rows by layer, and what the store holds, as host memory.
    host: Vec<Vec<Arc<Region>>>,
    device: Vec<Vec<Vec<Arc<Region>>>>,
    truth: Vec<(Layout, Vec<Vec<u8>>)>,
    keys: Vec<PageKey>,
}

/// Rows of `k` and `v` bytes.
type Rows = (u32, u32);
const SMALL: Rows = (24, 40);
/// So large that each layer of each component is a checksum block.
const LARGE: Rows = (1024, 1024);

fn pools((k, v): Rows) -> Vec<(Pool, Tile)> {
    let pool = |name: &str, kind, components: &[(&str, u32, RowUnit)]| {
        let components = components
            .iter()
            .map(|&(name, row_bytes, unit)| Component { unit, ..Component::per_token(name, row_bytes) })
            .collect();
        Pool::new(name, kind, DType::UInt8, None, components).unwrap()
    };
    let tile = |heads| {
        Tile::whole_page(Span { start: 2, end: 2 + LAYERS }, Span { start: 0, end: heads }, TOKENS).unwrap()
    };
    vec![
        (pool("kv", PoolKind::Kv, &[("k", k, RowUnit::Token), ("v", v, RowUnit::Token)]), tile(2)),
        (pool("indexer", PoolKind::Indexer, &[("i", 100, RowUnit::Page)]), tile(1)),
    ]
}

const ALL_LAYOUTS: [LayoutName; 5] = [
    LayoutName::LayerFirst,
    LayoutName::PageFirst,
    LayoutName::PageFirstDirect,
    LayoutName::PageHead,
    LayoutName::PageUnified { heads_per_group: 1 },
];

impl World {
    /// `pages` pages in the store, in `host_slots` host slots and as many device slots as pages and two more.
    fn new(layout: LayoutName, pages: usize, host_slots: u64) -> World {
        let options = StoreOptions { capacity_bytes: Some(64 << 20), ..StoreOptions::default() };
        World::with(layout, SMALL, pages, host_slots, options)
    }

    fn with(layout: LayoutName, rows: Rows, pages: usize, host_slots: u64, options: StoreOptions) -> World {
        let root = fast_folder();
        let keys = keys("layerwise", pages);
        let namespace = || Namespace::new("org/tiny", "r1", TOKENS, None).unwrap();
        let view_pools = || {
            pools(rows).into_iter().map(|(pool, tile)| ViewPool::new(pool, tile, layout)).collect::<Vec<_>>()
        };
        let mut truth = Vec::new();
        {
            let writer = open(root.path());
            let view = writer.view(namespace(), view_pools(), ViewOptions::default()).unwrap();
            let slots: Vec<i64> = (0..pages as i64).collect();
            for (pool, tile) in pools(rows) {
                let host = Layout::host(layout, &pool, &tile, pages as u64, false).unwrap();
                truth.push((host.clone(), pattern(&host)));
            }
            let sources: Vec<Vec<Arc<Region>>> = truth.iter().map(|(_, bytes)| regions(bytes)).collect();
            let memory = sources.iter().map(|regions| PoolMemory {
                regions: regions.iter().map(Arc::as_ref).collect(),
                slots: &slots,
            });
            let start = ChainStart { parent: None, depth: Some(0) };
            let report = view.backup(&keys, memory.collect(), start).unwrap();
            assert_eq!(report.leading(), pages);
        }
        let store = Store::open(root.path(), options).unwrap();
        let view = Arc::new(store.view(namespace(), view_pools(), ViewOptions::default()).unwrap());
        let canary = |layout: &Layout| -> Vec<Vec<u8>> {
            layout.buffer_bytes.iter().map(|&n| vec![CANARY; n as usize]).collect()
        };
        let (mut host, mut device, mut planned) = (Vec::new(), Vec::new(), Vec::new());
        for (pool, tile) in pools(rows) {
            let layout = Layout::host(layout, &pool, &tile, host_slots, false).unwrap();
            let its_host = regions(&canary(&layout));
            let rows: Vec<(Layout, Vec<Arc<Region>>)> = (tile.layers.start..tile.layers.end)
                .map(|layer| {
                    let tile = Tile { layers: Span { start: layer, end: layer + 1 }, ..tile };
                    let layout =
                        Layout::host(LayoutName::LayerFirst, &pool, &tile, pages as u64 + 2, true).unwrap();
                    let memory = regions(&canary(&layout));
                    (layout, memory)
                })
                .collect();
            device.push(rows.iter().map(|(_, memory)| memory.clone()).collect());
            let placed = |(layout, memory): (Layout, Vec<Arc<Region>>)| Placed {
                layout,
                memory: Memory::Host(memory.into()),
            };
            planned.push(TransferPool {
                name: pool.name().to_owned(),
                host: placed((layout, its_host.clone())),
                device: rows.into_iter().map(placed).collect(),
                first_step: 0,
            });
            host.push(its_host);
        }
        let plan = Arc::new(TransferPlan::new(planned).unwrap());
        World { _root: root, store, view, plan, host, device, truth, keys }
    }

    /// Restores page `i` to device slot `pages + 1 - i`.
    fn request(&self) -> TransferRestore {
        let (pages, host_slots) = (self.keys.len(), self.plan.pools()[0].host.layout.slots);
        let host: Vec<i64> = (0..host_slots.min(pages as u64) as i64).rev().collect();
        let device: Vec<i64> = (0..pages as i64).map(|page| pages as i64 + 1 - page).collect();
        TransferRestore {
            keys: self.keys.clone(),
            host_slots: vec![host; 2],
            device_slots: vec![device; 2],
            ..TransferRestore::default()
        }
    }

    fn restore(&self, request: &TransferRestore, executor: Arc<dyn Executor>) -> LayerwiseTicket {
        let restore = LayerwiseRestore::new(Arc::clone(&self.view), Arc::clone(&self.plan)).unwrap();
        restore.start(request.clone(), executor).unwrap()
    }

    /// Pages of which layer `step` is not exactly on the device, where `request` says.
    fn wrong_pages(&self, request: &TransferRestore, step: u32) -> Vec<usize> {
        let is_wrong = |&page: &usize| {
            self.plan.pools().iter().enumerate().any(|(number, pool)| {
                let (truth, bytes) = &self.truth[number];
                let slot = request.device_slots[number][page] as u64;
                let layout = &pool.device[step as usize].layout;
                let found = contents(&self.device[number][step as usize]);
                let tile = layout.tile;
                (0..truth.components.len()).any(|c| {
                    (tile.heads.start..tile.heads.end).any(|head| {
                        (0..TOKENS).any(|token| {
                            let len = truth.components[c].row_bytes as usize;
                            let (a, at) = truth.offset(c, page as u64, tile.layers.start, head, token);
                            let (b, to) = layout.offset(c, slot, tile.layers.start, head, token);
                            bytes[a][at as usize..][..len] != found[b][to as usize..][..len]
                        })
                    })
                })
            })
        };
        (0..self.keys.len()).filter(is_wrong).collect()
    }

    /// Whether every page is exactly in its host slot.
    fn is_host_exact(&self, request: &TransferRestore) -> bool {
        self.plan.pools().iter().enumerate().all(|(number, pool)| {
            let ((truth, bytes), layout) = (&self.truth[number], &pool.host.layout);
            let mut expected = vec![vec![CANARY; layout.buffer_bytes[0] as usize]];
            for (page, &slot) in request.host_slots[number].iter().enumerate() {
                copy_rows(truth, layout, &layout.tile, (page as u64, slot as u64), bytes, &mut expected);
            }
            contents(&self.host[number]) == expected
        })
    }

    fn assert_exact(&self, request: &TransferRestore) {
        for step in 0..LAYERS {
            assert_eq!(self.wrong_pages(request, step), [0; 0], "layer {step}");
        }
    }

    /// Fills the device rows.
    fn clear_device(&self, value: u8) {
        for region in self.device.iter().flatten().flatten() {
            region.copy_in(0, &vec![value; region.len()]).unwrap();
        }
    }

    fn store(&self) -> &Store {
        &self.store
    }

    fn root(&self) -> &std::path::Path {
        self._root.path()
    }
}

fn cpu() -> Arc<dyn Executor> {
    Arc::new(CpuCopies::new(1).unwrap())
}

fn stream() -> HostStream {
    HostStream::new(CpuCopies::new(1).unwrap()).unwrap()
}

fn far() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(60))
}

/// A stream whose copies of some layers wait for an event more, and which may be slow.
struct Slow {
    stream: HostStream,
    holds: HashMap<u32, Event>,
    pause: Duration,
}

impl Slow {
    fn holding(holds: HashMap<u32, Event>) -> Arc<Slow> {
        Arc::new(Slow { stream: stream(), holds, pause: Duration::ZERO })
    }
}

/// Comes some time after it is asked for.
struct Pause(Duration);

impl Completion for Pause {
    fn is_done(&self) -> hicache_core::Result<bool> {
        Ok(true)
    }

    fn wait_until(&self, _deadline: Option<Instant>) -> hicache_core::Result<bool> {
        std::thread::sleep(self.0);
        Ok(true)
    }
}

impl Executor for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn wait(&self, event: &Event) -> hicache_core::Result<()> {
        self.stream.wait(event)
    }

    fn copy(&self, plan: &Arc<LayerPlan>, slots: &Arc<Slots>) -> hicache_core::Result<()> {
        if let Some(event) = self.holds.get(&plan.step) {
            self.stream.wait(event)?;
        }
        if !self.pause.is_zero() {
            self.stream.wait(&(Arc::new(Pause(self.pause)) as Event))?;
        }
        self.stream.copy(plan, slots)
    }

    fn record(&self, step: Option<u32>) -> hicache_core::Result<Event> {
        self.stream.record(step)
    }
}

#[test]
fn every_layout_comes_back_exactly_however_it_is_read() {
    for layout in ALL_LAYOUTS {
        let world = World::new(layout, 6, 6);
        let readings =
            [Reading::Auto, Reading::Layers(1), Reading::Layers(3), Reading::Pages(1), Reading::Pages(4)];
        for reading in readings {
            for bounce in [Bounce::Never, Bounce::Always] {
                for announce in [Announce::Pages, Announce::Layers] {
                    let options = RestoreOptions { bounce, ..RestoreOptions::default() };
                    let request = TransferRestore { reading, announce, options, ..world.request() };
                    world.clear_device(CANARY);
                    let ticket = world.restore(&request, Arc::new(stream()));
                    for step in 0..LAYERS {
                        assert!(ticket.gate().wait(step, far()).unwrap());
                        assert_eq!(
                            world.wrong_pages(&request, step),
                            [0; 0],
                            "{layout}, {reading:?}, layer {step}"
                        );
                    }
                    let report = ticket.finish().unwrap();
                    assert_eq!(report.leading(), 6);
                    assert!(world.is_host_exact(&request), "{layout}, {reading:?}, {bounce:?}");
                    assert_eq!(report.bytes, 6 * (world.view.page_bytes(0) + world.view.page_bytes(1)));
                }
            }
        }
    }
}

#[test]
fn slots_that_nobody_named_keep_their_bytes() {
    let world = World::new(LayoutName::PageFirst, 3, 5);
    let mut request = world.request();
    request.host_slots = vec![vec![4, 0, 2]; 2];
    request.device_slots = vec![vec![0, -1, 3]; 2];
    let report = world.restore(&request, cpu()).finish().unwrap();
    assert_eq!(report.leading(), 3);
    for (number, pool) in world.plan.pools().iter().enumerate() {
        for (step, placed) in pool.device.iter().enumerate() {
            let found = contents(&world.device[number][step]);
            for rule in &placed.layout.components {
                for slot in [1, 2, 4] {
                    let at = (rule.base + slot * rule.page_stride) as usize;
                    let row = &found[rule.buffer][at..at + rule.page_stride as usize];
                    assert!(row.iter().all(|&byte| byte == CANARY), "slot {slot}");
                }
            }
        }
        let found = contents(&world.host[number]);
        for rule in &pool.host.layout.components {
            let at = (rule.base + rule.page_stride) as usize;
            let page = &found[rule.buffer][at..at + rule.page_stride as usize];
            assert!(page.iter().all(|&byte| byte == CANARY));
        }
    }
}

#[test]
fn fewer_host_slots_than_pages_are_filled_in_turn() {
    for host_slots in [1, 2, 3, 5] {
        let world = World::new(LayoutName::PageFirstDirect, 9, host_slots);
        let request = world.request();
        let slow = Slow { stream: stream(), holds: HashMap::new(), pause: Duration::from_micros(200) };
        let report = world.restore(&request, Arc::new(slow)).finish().unwrap();
        assert_eq!(report.leading(), 9, "{host_slots} host slots");
        world.assert_exact(&request);
    }
}

/// Restores with an order taken away, and says whether the device has the right bytes then.
fn is_exact_without(edge: Option<Edge>, world: &World, executor: Arc<dyn Executor>) -> bool {
    let edges = edge.map_or(Edges::default(), Edges::without);
    let request = TransferRestore { edges, ..world.request() };
    let ticket = world.restore(&request, executor);
    let exact = (0..LAYERS)
        .all(|step| ticket.gate().wait(step, far()).unwrap() && world.wrong_pages(&request, step).is_empty());
    ticket.finish().unwrap();
    exact
}

#[test]
fn a_copy_that_does_not_wait_for_the_load_is_caught() {
    let world = World::new(LayoutName::PageFirstDirect, 4, 4);
    assert!(!is_exact_without(Some(Edge::Load), &world, cpu()));
    let world = World::new(LayoutName::PageFirstDirect, 4, 4);
    assert!(is_exact_without(None, &world, cpu()));
}

#[test]
fn a_host_slot_that_is_filled_too_early_is_caught() {
    let slow = || Arc::new(Slow { stream: stream(), holds: HashMap::new(), pause: Duration::from_millis(5) });
    let world = World::new(LayoutName::PageFirstDirect, 8, 2);
    assert!(!is_exact_without(Some(Edge::SlotReuse), &world, slow()));
    let world = World::new(LayoutName::PageFirstDirect, 8, 2);
    assert!(is_exact_without(None, &world, slow()));
}

#[test]
fn a_read_that_does_not_wait_for_its_layer_is_caught() {
    let hold = HostEvent::new();
    let held = || Slow::holding(HashMap::from([(2, Arc::clone(&hold) as Event)]));
    let world = World::new(LayoutName::PageFirst, 4, 4);
    let edges = Edges::without(Edge::Loaded);
    let request = TransferRestore { edges, ..world.request() };
    let ticket = world.restore(&request, held());
    assert!(ticket.gate().wait(2, far()).unwrap());
    assert_eq!(world.wrong_pages(&request, 2), [0, 1, 2, 3]);
    hold.set();
    ticket.finish().unwrap();
    world.assert_exact(&request);
}

/// Field case D18: a slow producer still writes the pages when the restore is asked for.
#[test]
fn a_restore_waits_for_whoever_still_writes_its_pages() {
    let world = Arc::new(World::new(LayoutName::PageFirst, 2, 2));
    let round = |edges: Edges, pause: Duration| {
        let producer_ends = HostEvent::new();
        world.clear_device(CANARY);
        let device_free: Vec<Event> = vec![Arc::clone(&producer_ends) as Event];
        let request = TransferRestore { edges, device_free, ..world.request() };
        let ticket = world.restore(&request, Arc::new(stream()));
        let producer = {
            let world = Arc::clone(&world);
            std::thread::spawn(move || {
                std::thread::sleep(pause);
                world.clear_device(0xee);
                producer_ends.set();
            })
        };
        producer.join().unwrap();
        ticket.finish().unwrap();
        (0..LAYERS).all(|step| world.wrong_pages(&request, step).is_empty())
    };
    for number in 0..200 {
        assert!(round(Edges::default(), Duration::from_micros(number % 4 * 100)), "round {number}");
    }
    // Without the wait the producer's bytes are found.
    assert!(!round(Edges::without(Edge::Ready), Duration::from_millis(300)));
}

/// Field case D18: layer 1 right after its event, while layer 2 is delayed.
#[test]
fn a_layer_is_exact_at_its_event_while_later_ones_are_still_to_come() {
    let hold = HostEvent::new();
    let executor = Slow::holding(HashMap::from([(2, Arc::clone(&hold) as Event)]));
    let world = World::new(LayoutName::PageFirst, 4, 4);
    let request = world.request();
    let ticket = world.restore(&request, executor);
    let gate = ticket.gate();
    assert!(gate.wait(1, far()).unwrap());
    gate.read(1).unwrap();
    assert_eq!(world.wrong_pages(&request, 1), [0; 0]);
    for later in [2, 3] {
        assert!(!gate.is_ready(later).unwrap());
        assert_eq!(gate.read(later).unwrap_err().kind(), ErrorKind::Config);
        assert_eq!(world.wrong_pages(&request, later), [0, 1, 2, 3]);
        assert!(!gate.wait(later, Some(Instant::now())).unwrap());
    }
    assert!(!ticket.drained().is_done().unwrap());
    hold.set();
    assert!(gate.wait(3, far()).unwrap());
    world.assert_exact(&request);
    ticket.finish().unwrap();
    assert!(ticket.drained().is_done().unwrap());
    assert_eq!(gate.read(LAYERS).unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn a_page_that_cannot_be_read_is_a_miss_for_all_its_layers() {
    for reading in [Reading::Layers(1), Reading::Pages(2)] {
        let options = StoreOptions { capacity_bytes: Some(64 << 20), ..StoreOptions::default() };
        let world = World::with(LayoutName::PageFirstDirect, LARGE, 5, 5, options);
        let of_key = objects(world.root()).into_iter().filter(|object| object.key == world.keys[3]);
        let kv = of_key.max_by_key(|object| object.payload.end - object.payload.start).unwrap();
        flip(&kv.segment, kv.payload.end - 1, 3); // V of the last layer
        let request = TransferRestore { reading, ..world.request() };
        let ticket = world.restore(&request, Arc::new(stream()));
        let report = ticket.finish().unwrap();
        let mut expected = [RestoreOutcome::Restored; 5];
        expected[3] = RestoreOutcome::Damaged;
        assert_eq!(report.outcomes, expected, "{reading:?}");
        assert_eq!(report.bytes, 4 * (world.view.page_bytes(0) + world.view.page_bytes(1)));
        for step in 0..LAYERS {
            assert!(ticket.gate().wait(step, far()).unwrap());
            let wrong = world.wrong_pages(&request, step);
            // By layers, the damage is found when the layers before it are on the device already.
            let is_there = reading == Reading::Layers(1) && step < LAYERS - 1;
            assert_eq!(wrong, if is_there { vec![] } else { vec![3] }, "{reading:?}, layer {step}");
        }
    }
}

/// A store whose payload reads from the `nth` on wait until they are let go, then fail if asked to.
fn holding_reads(nth: u64) -> (StoreOptions, Arc<HostEvent>, Arc<AtomicBool>, Arc<AtomicU64>) {
    let (gate, fails, seen) =
        (HostEvent::new(), Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (its_gate, its_fails, its_seen) = (Arc::clone(&gate), Arc::clone(&fails), Arc::clone(&seen));
    let options = hooked(move |call| {
        let is_payload = !call.is_write && call.path.extension().is_some_and(|end| end == "seg");
        if is_payload && its_seen.fetch_add(1, Ordering::SeqCst) >= nth {
            its_gate.wait_until(None).unwrap();
            if its_fails.load(Ordering::SeqCst) {
                return Err(crate::support::errno(5));
            }
        }
        Ok(())
    });
    (options, gate, fails, seen)
}

#[test]
fn nothing_is_announced_before_every_page_is_known_to_be_whole() {
    let (options, gate, _, _) = holding_reads(12);
    let world = World::with(LayoutName::PageFirstDirect, SMALL, 2, 2, options);
    let request = TransferRestore { reading: Reading::Layers(1), ..world.request() };
    let ticket = world.restore(&request, Arc::new(stream()));
    // Layer 0 has been copied, layer 3 has not been read.
    let patience = Instant::now() + Duration::from_secs(60);
    while !world.wrong_pages(&request, 0).is_empty() {
        assert!(Instant::now() < patience, "layer 0 is not copied while layer 3 is not read");
        std::thread::yield_now();
    }
    assert!(!ticket.gate().is_ready(0).unwrap());
    assert!(ticket.gate().event(0, Some(Instant::now())).unwrap().is_none());
    gate.set();
    assert!(ticket.gate().wait(0, far()).unwrap());
    assert_eq!(ticket.finish().unwrap().leading(), 2);
    world.assert_exact(&request);
}

#[test]
fn layers_that_were_announced_early_are_withdrawn_when_a_page_fails() {
    let (options, gate, fails, _) = holding_reads(12);
    let world = World::with(LayoutName::PageFirstDirect, SMALL, 2, 2, options);
    let request =
        TransferRestore { reading: Reading::Layers(1), announce: Announce::Layers, ..world.request() };
    let ticket = world.restore(&request, Arc::new(stream()));
    assert!(ticket.gate().wait(0, far()).unwrap());
    assert_eq!(world.wrong_pages(&request, 0), [0; 0]);
    fails.store(true, Ordering::SeqCst);
    gate.set();
    let report = ticket.finish().unwrap();
    assert!(report.outcomes.contains(&RestoreOutcome::Error), "{report:?}");
    for step in 0..LAYERS {
        assert_eq!(ticket.gate().read(step).unwrap_err().kind(), ErrorKind::Closed, "layer {step}");
    }
}

#[test]
fn a_withdrawn_restore_gives_its_good_pages_up_too() {
    let options = StoreOptions { capacity_bytes: Some(64 << 20), ..StoreOptions::default() };
    let world = World::with(LayoutName::PageFirstDirect, LARGE, 3, 3, options);
    let of_key = objects(world.root()).into_iter().filter(|object| object.key == world.keys[1]);
    let kv = of_key.max_by_key(|object| object.payload.end - object.payload.start).unwrap();
    flip(&kv.segment, kv.payload.end - 1, 3); // V of the last layer
    let request =
        TransferRestore { reading: Reading::Layers(1), announce: Announce::Layers, ..world.request() };
    let ticket = world.restore(&request, Arc::new(stream()));
    let report = ticket.finish().unwrap();
    let (restored, damaged) = (RestoreOutcome::Restored, RestoreOutcome::Damaged);
    assert_eq!(report.outcomes, [restored, damaged, restored]);
    for step in 0..LAYERS {
        assert_eq!(ticket.gate().read(step).unwrap_err().kind(), ErrorKind::Closed, "layer {step}");
    }
}

#[test]
fn a_restore_whose_slots_are_not_free_in_time_is_late() {
    let world = World::new(LayoutName::PageFirst, 3, 3);
    let never = HostEvent::new();
    // Time enough to read the pages, if nothing waited for the slots.
    let deadline = Some(Instant::now() + Duration::from_millis(300));
    let options = RestoreOptions { deadline, ..RestoreOptions::default() };
    let host_free: Vec<Event> = vec![Arc::clone(&never) as Event];
    let request = TransferRestore { options, host_free, ..world.request() };
    let ticket = world.restore(&request, cpu());
    let report = ticket.finish().unwrap();
    assert_eq!(report.outcomes, [RestoreOutcome::Late; 3]);
    assert_eq!(report.bytes, 0);
    assert_eq!(ticket.gate().read(0).unwrap_err().kind(), ErrorKind::Closed);
    for memory in &world.host {
        assert!(contents(memory).iter().flatten().all(|&byte| byte == CANARY));
    }
}

#[test]
fn a_restore_that_misses_its_deadline_brings_no_half_pages() {
    let (options, gate, _, seen) = holding_reads(8);
    let world = World::with(LayoutName::PageFirstDirect, SMALL, 2, 2, options);
    let deadline = Instant::now() + Duration::from_millis(200);
    let options = RestoreOptions { deadline: Some(deadline), bounce: Bounce::Always };
    let request = TransferRestore { reading: Reading::Layers(1), options, ..world.request() };
    let ticket = world.restore(&request, Arc::new(stream()));
    let report = ticket.finish().unwrap();
    assert!(seen.load(Ordering::SeqCst) > 8, "some layers were read");
    assert_eq!(report.outcomes, [RestoreOutcome::Late; 2]);
    assert_eq!(ticket.gate().read(0).unwrap_err().kind(), ErrorKind::Closed);
    gate.set();
}

/// Pages whose layers are 64 KiB each: reading layers by themselves pays where they lie together.
#[test]
fn layers_are_read_by_themselves_where_they_lie_together() {
    let pool = || {
        let components = vec![Component::per_token("k", 256), Component::per_token("v", 256)];
        Pool::new("kv", PoolKind::Kv, DType::UInt8, None, components).unwrap()
    };
    let tile = Tile::whole_page(Span { start: 0, end: 8 }, Span { start: 0, end: 8 }, 16).unwrap();
    let pages = 20;
    for (layout, groups) in [(LayoutName::PageUnified { heads_per_group: 8 }, 8), (LayoutName::PageFirst, 1)]
    {
        let root = fast_folder();
        let reads: Arc<Mutex<Vec<u64>>> = Arc::default();
        let log = Arc::clone(&reads);
        let options = hooked(move |call| {
            if !call.is_write && call.len >= 64 << 10 {
                log.lock().unwrap().push(call.len);
            }
            Ok(())
        });
        let store = Store::open(root.path(), options).unwrap();
        let namespace = Namespace::new("org/large", "r1", 16, None).unwrap();
        let spec = ViewPool::new(pool(), tile, layout);
        let view = Arc::new(store.view(namespace, vec![spec], ViewOptions::default()).unwrap());
        let host = Layout::host(layout, &pool(), &tile, pages, false).unwrap();
        let device = Layout::host(LayoutName::LayerFirst, &pool(), &tile, pages, false).unwrap();
        let source = regions(&pattern(&host));
        let slots: Vec<i64> = (0..pages as i64).collect();
        let keys = keys("large", pages as usize);
        let memory = vec![PoolMemory { regions: vec![&source[0]], slots: &slots }];
        view.backup(&keys, memory, ChainStart { parent: None, depth: Some(0) }).unwrap();
        let placed = |layout: &Layout| {
            let bytes: Vec<Vec<u8>> = layout.buffer_bytes.iter().map(|&n| vec![CANARY; n as usize]).collect();
            Placed { layout: layout.clone(), memory: Memory::Host(regions(&bytes).into()) }
        };
        let plan = TransferPlan::new(vec![TransferPool {
            name: "kv".into(),
            host: placed(&host),
            device: vec![placed(&device)],
            first_step: 0,
        }]);
        let restore = LayerwiseRestore::new(view, Arc::new(plan.unwrap())).unwrap();
        reads.lock().unwrap().clear();
        let request = TransferRestore {
            keys,
            host_slots: vec![slots.clone()],
            device_slots: vec![slots],
            ..TransferRestore::default()
        };
        assert_eq!(restore.start(request, cpu()).unwrap().finish().unwrap().leading(), pages as usize);
        let reads = reads.lock().unwrap();
        let page_bytes = 8 * (64 << 10);
        assert_eq!(reads.iter().sum::<u64>(), pages * page_bytes, "{layout}: each byte once");
        if groups > 1 {
            assert!(reads.iter().all(|&len| len == page_bytes / groups), "{layout}: {reads:?}");
        } else {
            assert!(reads.iter().any(|&len| len > page_bytes / 8), "{layout}: {reads:?}");
        }
    }
}

#[test]
fn a_restore_of_no_pages_is_ready() {
    let world = World::new(LayoutName::PageFirst, 2, 2);
    let request = TransferRestore {
        host_slots: vec![Vec::new(); 2],
        device_slots: vec![Vec::new(); 2],
        ..TransferRestore::default()
    };
    let ticket = world.restore(&request, Arc::new(stream()));
    assert!(ticket.gate().wait(LAYERS - 1, far()).unwrap());
    assert_eq!(ticket.finish().unwrap().outcomes, []);
}

#[test]
fn a_closed_store_refuses_and_withdraws() {
    let (options, gate, _, seen) = holding_reads(8);
    let world = World::with(LayoutName::PageFirstDirect, SMALL, 2, 2, options);
    let request = TransferRestore { reading: Reading::Layers(1), ..world.request() };
    let ticket = world.restore(&request, Arc::new(stream()));
    while seen.load(Ordering::SeqCst) <= 8 {
        std::thread::yield_now();
    }
    let store = world.store.clone();
    let closing = std::thread::spawn(move || store.close());
    while world.view.match_prefix(&world.keys).is_ok() {
        std::thread::yield_now();
    }
    // The store is closed for every call from now on, and later layers are still to be read.
    gate.set();
    closing.join().unwrap();
    assert_eq!(ticket.finish().unwrap_err().kind(), ErrorKind::Closed);
    for step in 0..LAYERS {
        assert_eq!(ticket.gate().read(step).unwrap_err().kind(), ErrorKind::Closed, "layer {step}");
    }
    let restore = LayerwiseRestore::new(Arc::clone(&world.view), Arc::clone(&world.plan)).unwrap();
    assert_eq!(restore.start(request, cpu()).err().unwrap().kind(), ErrorKind::Closed);
}

#[test]
fn requests_that_do_not_fit_are_refused() {
    let world = World::new(LayoutName::PageFirst, 3, 3);
    let restore = LayerwiseRestore::new(Arc::clone(&world.view), Arc::clone(&world.plan)).unwrap();
    let good = world.request();
    let change: [fn(&mut TransferRestore); 8] = [
        |request| request.host_slots.truncate(1),
        |request| request.device_slots[1].truncate(2),
        |request| request.host_slots[0] = vec![0, 1, 3],
        |request| request.host_slots[1] = vec![0, 1, 1],
        |request| request.device_slots[0] = vec![2, 0, 2],
        |request| request.host_slots = vec![vec![0, -1]; 2],
        |request| request.reading = Reading::Layers(0),
        |request| {
            request.host_slots = vec![vec![0, 1]; 2];
            request.reading = Reading::Layers(1);
        },
    ];
    for (i, change) in change.into_iter().enumerate() {
        let mut request = good.clone();
        change(&mut request);
        let refused = restore.start(request, cpu()).err().unwrap_or_else(|| panic!("case {i}"));
        assert!(matches!(refused.kind(), ErrorKind::Geometry | ErrorKind::Config), "case {i}");
    }
    let other = World::new(LayoutName::PageHead, 3, 3);
    let error = LayerwiseRestore::new(Arc::clone(&world.view), Arc::clone(&other.plan)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Geometry);
}

/// A fresh world whose store does not have the pages, and whose device does.
fn to_back_up(layout: LayoutName, host_slots: u64) -> (World, World, TransferBackup) {
    let stored = World::new(layout, 6, 6);
    let request = stored.request();
    stored.restore(&request, cpu()).finish().unwrap();
    let fresh = World::new(layout, 1, host_slots);
    let mut pools = fresh.plan.pools().to_vec();
    for (pool, other) in pools.iter_mut().zip(stored.plan.pools()) {
        pool.device = other.device.clone();
    }
    let host: Vec<i64> = (0..host_slots.min(6) as i64).collect();
    let backup = TransferBackup {
        keys: keys("other", 6),
        host_slots: vec![host; 2],
        device_slots: request.device_slots,
        start: ChainStart { parent: None, depth: Some(0) },
        ..TransferBackup::default()
    };
    let fresh = World { plan: Arc::new(TransferPlan::new(pools).unwrap()), ..fresh };
    (stored, fresh, backup)
}

fn back_up(world: &World, request: &TransferBackup, executor: Arc<dyn Executor>) -> usize {
    let backup = LayerwiseBackup::new(Arc::clone(&world.view), Arc::clone(&world.plan)).unwrap();
    backup.start(request.clone(), executor).unwrap().finish().unwrap().leading()
}

/// Whether what was backed up comes back as it was on the device.
fn comes_back(stored: &World, fresh: &World, request: &TransferBackup) -> bool {
    stored.clear_device(CANARY);
    let ring = fresh.plan.pools()[0].host.layout.slots.min(6) as i64;
    let restore = TransferRestore {
        keys: request.keys.clone(),
        host_slots: vec![(0..ring).collect(); 2],
        device_slots: request.device_slots.clone(),
        ..TransferRestore::default()
    };
    let report = fresh.restore(&restore, cpu()).finish().unwrap();
    report.leading() == 6 && (0..LAYERS).all(|step| stored.wrong_pages(&stored.request(), step).is_empty())
}

#[test]
fn a_backup_is_the_restore_in_reverse() {
    for layout in ALL_LAYOUTS {
        for host_slots in [1, 2, 3, 6] {
            let (stored, fresh, request) = to_back_up(layout, host_slots);
            assert_eq!(back_up(&fresh, &request, Arc::new(stream())), 6);
            assert!(comes_back(&stored, &fresh, &request), "{layout}, {host_slots} host slots");
        }
    }
}

#[test]
fn a_backup_waits_for_each_layer_and_for_its_copies() {
    for edge in [None, Some(Edge::Ready), Some(Edge::Load)] {
        let (stored, fresh, request) = to_back_up(LayoutName::PageFirstDirect, 6);
        let right: Vec<Vec<Vec<Vec<u8>>>> =
            stored.device.iter().map(|layers| layers.iter().map(|rows| contents(rows)).collect()).collect();
        stored.clear_device(0xee);
        let events: Vec<Arc<HostEvent>> = (0..LAYERS).map(|_| HostEvent::new()).collect();
        let layer_ready = events.iter().map(|event| Arc::clone(event) as Event).collect();
        let edges = edge.map_or(Edges::default(), Edges::without);
        let request = TransferBackup { layer_ready, edges, ..request };
        let backup = LayerwiseBackup::new(Arc::clone(&fresh.view), Arc::clone(&fresh.plan)).unwrap();
        let ticket = backup.start(request.clone(), Arc::new(stream())).unwrap();
        // The model ends its layers one after the other; what was taken too early is found in the store.
        match edge {
            None => {}
            Some(Edge::Ready) => assert_eq!(ticket.finish().unwrap().leading(), 6),
            // The copies wait for the layers, but the store does not wait for the copies.
            Some(_) => {
                while crate::support::counter(&fresh.store, Counter::BackupStored) < 6 {
                    std::thread::yield_now();
                }
            }
        }
        for (step, event) in events.iter().enumerate() {
            for (rows, right) in stored.device.iter().zip(&right) {
                for (region, bytes) in rows[step].iter().zip(&right[step]) {
                    region.copy_in(0, bytes).unwrap();
                }
            }
            event.set();
        }
        if edge != Some(Edge::Ready) {
            assert_eq!(ticket.finish().unwrap().leading(), 6);
        }
        assert_eq!(comes_back(&stored, &fresh, &request), edge.is_none(), "{edge:?}");
    }
}

#[test]
fn a_backup_whose_rows_are_not_ready_in_time_is_late() {
    let (_stored, fresh, request) = to_back_up(LayoutName::PageFirst, 6);
    let slow = HostEvent::new();
    let options = BackupOptions { deadline: Some(Instant::now()), ..BackupOptions::default() };
    let request = TransferBackup { ready: vec![Arc::clone(&slow) as Event], options, ..request };
    let backup = LayerwiseBackup::new(Arc::clone(&fresh.view), Arc::clone(&fresh.plan)).unwrap();
    let ticket = backup.start(request, Arc::new(stream())).unwrap();
    assert!(!ticket.drained().is_done().unwrap());
    slow.set();
    let report = ticket.finish().unwrap();
    assert_eq!(report.leading(), 0);
    assert!(report.reason.is_some());
    assert!(ticket.drained().is_done().unwrap());
}

#[test]
fn counts_are_those_of_whole_pages() {
    let world = World::new(LayoutName::PageFirstDirect, 3, 3);
    let request = TransferRestore { reading: Reading::Layers(1), ..world.request() };
    world.restore(&request, cpu()).finish().unwrap();
    let counter = |counter| crate::support::counter(world.store(), counter);
    assert_eq!(counter(Counter::RestoreRestored), 3);
    assert_eq!(counter(Counter::RestoreBytes), 3 * (world.view.page_bytes(0) + world.view.page_bytes(1)));
}
