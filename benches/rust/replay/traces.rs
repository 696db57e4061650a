//! The traces in `benches/data/traces`; its README says how they are written.

/// A trace in memory.
pub struct Trace {
    /// Its name.
    pub name: &'static str,
    /// Of each page, the page before it.
    parents: Vec<Option<u32>>,
    /// Of each request, its last page.
    last_pages: Vec<Option<u32>>,
}

/// All traces, smallest first.
pub fn all() -> Vec<Trace> {
    vec![
        read("tau_airline_interleaved", include_bytes!("../../data/traces/tau_airline_interleaved.zst")),
        read("mooncake_conversation", include_bytes!("../../data/traces/mooncake_conversation.zst")),
        read("claude_code_mix100", include_bytes!("../../data/traces/claude_code_mix100.zst")),
    ]
}

fn read(name: &'static str, packed: &[u8]) -> Trace {
    let bytes = zstd::decode_all(packed).expect("a zstd file");
    let mut bytes = bytes.into_iter();
    let mut trace = Trace { name, parents: Vec::new(), last_pages: Vec::new() };
    while let (Some(back), Some(fresh)) = (number(&mut bytes), number(&mut bytes)) {
        let mut last = if back == 0 { None } else { Some(trace.parents.len() as u32 - back) };
        for _ in 0..fresh {
            trace.parents.push(last);
            last = Some(trace.parents.len() as u32 - 1);
        }
        trace.last_pages.push(last);
    }
    trace
}

/// A number in LEB128.
fn number(bytes: &mut impl Iterator<Item = u8>) -> Option<u32> {
    let (mut value, mut shift) = (0, 0);
    loop {
        let byte = bytes.next()?;
        value |= u32::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
}

impl Trace {
    /// Requests in it.
    pub fn requests(&self) -> usize {
        self.last_pages.len()
    }

    /// Different pages asked for.
    pub fn pages(&self) -> usize {
        self.parents.len()
    }

    /// Hands out each request's number and pages, in order.
    pub fn each(&self, mut request: impl FnMut(usize, &[u32])) {
        let mut pages = Vec::new();
        for (number, &last) in self.last_pages.iter().enumerate() {
            pages.clear();
            let mut page = last;
            while let Some(this) = page {
                pages.push(this);
                page = self.parents[this as usize];
            }
            pages.reverse();
            request(number, &pages);
        }
    }
}
