//! The choices of a schedule: drawn from a seed, or taken from a list.

/// Draws numbers and remembers them.
#[derive(Debug, Clone)]
pub struct Choices {
    state: u64,
    list: Option<Vec<u32>>,
    taken: Vec<u32>,
}

impl Choices {
    /// Choices that follow from `seed`.
    pub fn from_seed(seed: u64) -> Choices {
        let mut choices = Choices { state: 0, list: None, taken: Vec::with_capacity(1024) };
        choices.reseed(seed);
        choices
    }

    /// The choices of a list; behind its end, the first alternative always.
    pub fn from_list(list: Vec<u32>) -> Choices {
        Choices { state: 0, list: Some(list), taken: Vec::new() }
    }

    /// Begins a new schedule.
    pub fn reseed(&mut self, seed: u64) {
        // Neighbouring seeds must not give neighbouring streams.
        self.state = crate::digest::scatter(seed) | 1;
        self.list = None;
        self.taken.clear();
    }

    /// One of `n` alternatives; 0 where there is only one.
    #[inline]
    pub fn below(&mut self, n: u32) -> u32 {
        let choice = match &self.list {
            Some(list) => list.get(self.taken.len()).copied().unwrap_or(0) % n.max(1),
            None => {
                self.state ^= self.state << 13;
                self.state ^= self.state >> 7;
                self.state ^= self.state << 17;
                let high = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
                ((high * u64::from(n)) >> 32) as u32
            }
        };
        self.taken.push(choice);
        choice
    }

    /// True once in `n` times; the harmless alternative is false.
    #[inline]
    pub fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == n - 1 && n > 1
    }

    /// What has been chosen so far.
    pub fn taken(&self) -> &[u32] {
        &self.taken
    }
}
