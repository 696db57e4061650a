//! What is asked of memory, and what was got.

/// How much something is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wish {
    /// Not at all.
    #[default]
    Off,
    /// If it can be had; the report says why not.
    Try,
    /// Or else an error.
    Require,
}

/// Where memory should stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Node {
    /// Wherever the system puts it.
    #[default]
    Any,
    /// On the node of the CPU that the calling thread runs on.
    Local,
    /// On this node.
    Number(u32),
}

/// Memory as it is wished for.
#[derive(Debug, Clone)]
pub struct MemoryOptions {
    /// Bytes of one copy page, which no registered piece cuts in two.
    pub copy_page_bytes: usize,
    /// Pages of 2 MiB or more: of the hugetlb pool, else transparent ones.
    pub huge_pages: Wish,
    /// Size of hugetlb pages in bytes, a power of two; `None` for the system's usual one.
    pub huge_page_bytes: Option<usize>,
    /// NUMA node.
    pub node: Node,
    /// Whether memory of another node is an error, rather than a line in the report.
    pub node_is_required: bool,
    /// Whether every page gets its memory now.
    pub prefault: bool,
    /// Threads that touch; 0 for as many as suit the size and the machine.
    pub touch_threads: usize,
    /// Locking into memory. Registering does it too, and then nothing else is locked.
    pub lock: Wish,
    /// Making it known to the CUDA driver.
    pub register: Wish,
    /// Most bytes that are registered in one piece.
    pub register_piece_bytes: usize,
    /// Whether other processes can map it by its descriptor.
    pub shared: bool,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        MemoryOptions {
            copy_page_bytes: 1,
            huge_pages: Wish::Try,
            huge_page_bytes: None,
            node: Node::Any,
            node_is_required: false,
            prefault: true,
            touch_threads: 0,
            lock: Wish::Off,
            register: Wish::Try,
            register_piece_bytes: 64 << 30,
            shared: false,
        }
    }
}

/// Pages that memory stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageKind {
    /// The system's own size.
    Ordinary,
    /// Transparent huge pages, at least in part.
    Transparent,
    /// Pages of the hugetlb pool.
    Hugetlb,
}

/// Memory as it was got.
#[derive(Debug, Clone)]
pub struct MemoryReport {
    /// Bytes mapped: those asked for, rounded up to pages.
    pub mapped_bytes: usize,
    /// What the pages are.
    pub pages: PageKind,
    /// Bytes of each page; of transparent huge ones, the parts that they may fall into.
    pub page_bytes: usize,
    /// Bytes on huge pages when it was made, as the kernel counts them.
    pub huge_bytes: usize,
    /// The node that it stands on, where one was asked for and given.
    pub node: Option<u32>,
    /// Whether every page had its memory when it was made.
    pub prefaulted: bool,
    /// Whether it was locked into memory.
    pub locked: bool,
    /// Bytes of each registered piece, in order; none where it is not registered.
    pub registered_pieces: Vec<usize>,
    /// Whether other processes can map it.
    pub shared: bool,
    /// Each wish that was not met, with the reason.
    pub unmet: Vec<String>,
}

impl MemoryReport {
    /// What was got, in words: of `hugetlb`, `thp`, `bound`, `prefaulted`, `locked`, `registered`, `shared`.
    pub fn words(&self) -> Vec<&'static str> {
        let all = [
            (self.pages == PageKind::Hugetlb, "hugetlb"),
            (self.pages == PageKind::Transparent, "thp"),
            (self.node.is_some(), "bound"),
            (self.prefaulted, "prefaulted"),
            (self.locked, "locked"),
            (!self.registered_pieces.is_empty(), "registered"),
            (self.shared, "shared"),
        ];
        all.into_iter().filter(|(is_so, _)| *is_so).map(|(_, word)| word).collect()
    }
}
