//! Sizes of rings.

/// Alignment of rings: a multiple of the page size of every Linux.
pub(super) const ALIGN: usize = 1 << 16;
/// Largest ring.
const LARGEST: usize = 1 << 30;

/// Bytes of each ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingBytes {
    /// Ring with one reader.
    pub(crate) single: usize,
    /// Ring with the whole group as readers.
    pub(crate) common: usize,
}

impl Default for RingBytes {
    /// Two tiles of 128 KiB: a rank fills one while a reader has the other. `linux/tests/throughput.rs` compares sizes.
    fn default() -> Self {
        RingBytes { single: 1 << 18, common: 1 << 18 }
    }
}

impl RingBytes {
    /// Returns true if both sizes are powers of two between 64 KiB and 1 GiB.
    pub(super) fn can_be_mapped(self) -> bool {
        [self.single, self.common]
            .iter()
            .all(|bytes| bytes.is_power_of_two() && (ALIGN..=LARGEST).contains(bytes))
    }
}
