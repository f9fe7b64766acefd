//! Upper halves of generations.

/// Gives each channel an epoch of its own, also across restarts: a guest compares generations
/// only for equality, and would miss a publication whose generation it has seen before.
#[derive(Debug)]
pub(super) struct Epochs(u32);

impl Epochs {
    /// Epochs that follow `first`.
    pub(super) fn after(first: u32) -> Self {
        Self(first)
    }

    /// The next epoch, never 0.
    pub(super) fn take(&mut self) -> u32 {
        self.0 = self.0.checked_add(1).unwrap_or(1);
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_do_not_come_back_and_are_never_0() {
        let mut epochs = Epochs::after(u32::MAX - 2);
        assert_eq!([(); 4].map(|()| epochs.take()), [u32::MAX - 1, u32::MAX, 1, 2]);
    }
}
