//! Memory made known to the CUDA driver, piece by piece, and made unknown again.

use crate::cuda::{CudaError, Driver, Primary};

/// What the driver knows of one mapping: the exact pieces, in order.
#[derive(Debug)]
pub(super) struct Registration {
    driver: &'static Driver,
    primary: Primary,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    base: usize,
    len: usize,
}

/// Why a range could not be registered.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) error: CudaError,
    /// Whether the driver has forgotten the pieces before the refused one. If not, they must stay mapped.
    pub(super) is_undone: bool,
}

impl Refusal {
    fn without_trace(error: CudaError) -> Refusal {
        Refusal { error, is_undone: true }
    }
}

impl Registration {
    /// Registers `len` bytes at `base` in pieces of `piece` bytes, for all devices. What was registered when one is
    /// refused is undone, the last first.
    ///
    /// # Safety
    /// The range stays mapped until [`Registration::undo`] has returned `Ok`.
    pub(super) unsafe fn new(
        driver: &'static Driver,
        base: usize,
        len: usize,
        piece: usize,
    ) -> Result<Registration, Refusal> {
        let primary = Primary::of_this_thread(driver).map_err(Refusal::without_trace)?;
        let mut registration = Registration { driver, primary, pieces: Vec::new() };
        let entered = registration.primary.enter().map_err(Refusal::without_trace)?;
        let mut outcome = Ok(());
        let mut pieces = Vec::with_capacity(len.div_ceil(piece));
        for start in (base..base + len).step_by(piece) {
            let piece = Piece { base: start, len: piece.min(base + len - start) };
            // SAFETY: a part of a range that stays mapped, as the caller promises.
            outcome = unsafe { driver.host_register(piece.base, piece.len) };
            if outcome.is_err() {
                break;
            }
            pieces.push(piece);
        }
        drop(entered);
        registration.pieces = pieces;
        match outcome {
            Ok(()) => Ok(registration),
            // The first refusal is the one to tell.
            Err(error) => Err(Refusal { error, is_undone: registration.undo().is_ok() }),
        }
    }

    /// Bytes of each piece, in order.
    pub(super) fn piece_bytes(&self) -> Vec<usize> {
        self.pieces.iter().map(|piece| piece.len).collect()
    }

    /// The device's address of the host address `address`.
    pub(super) fn device_address(&self, address: usize) -> Result<u64, CudaError> {
        let _entered = self.primary.enter()?;
        self.driver.host_device_pointer(address)
    }

    /// Unregisters every piece, the last first. A driver that has ended has done it already.
    ///
    /// # Errors
    /// The driver's first refusal. What it still knows must stay mapped.
    pub(super) fn undo(&mut self) -> Result<(), CudaError> {
        let entered = match self.primary.enter() {
            Ok(entered) => Some(entered),
            Err(error) if error.is_gone() => None,
            Err(error) => return Err(error),
        };
        while let Some(piece) = self.pieces.last() {
            // SAFETY: the owner of the memory has waited for what the device does with it, or the process ends.
            unsafe { self.driver.host_unregister(piece.base) }?;
            self.pieces.pop();
        }
        drop(entered);
        Ok(())
    }
}
