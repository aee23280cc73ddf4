//! Offsets within a region: words first, then the rings. Arithmetic alone.

use crate::shared_memory::RingBytes;
use crate::shared_memory::rings::ALIGN;
use std::ops::Range;

/// Distance between words, so that no two share a cache line or a pair of lines that is fetched together.
const LINE: usize = 128;

/// Stream that a rank writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingStream {
    /// Stream with the whole group as readers.
    Common,
    /// Stream with one reader.
    To(usize),
}

/// Acknowledgement in a reader's region: its position in a stream of `writer`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ack {
    pub(super) writer: usize,
    /// True for the writer's common stream, false for its stream to this reader.
    pub(super) common: bool,
}

/// Places of words and rings in the region of any rank of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) world_size: usize,
    pub(super) rings: RingBytes,
}

impl Layout {
    /// Returns the layout, or `None` if rings of these sizes cannot be mapped.
    pub(super) fn new(world_size: usize, rings: RingBytes) -> Option<Self> {
        rings.can_be_mapped().then_some(Layout { world_size, rings })
    }

    /// Offset of the word that says that the rank sleeps.
    pub(super) fn sleep(&self) -> usize {
        0
    }

    /// Offset of the word that says that the rank closed its streams.
    pub(super) fn closed(&self) -> usize {
        LINE
    }

    /// Offset of the position up to which `stream` is written.
    pub(super) fn written(&self, stream: RingStream) -> usize {
        (2 + self.index(stream)) * LINE
    }

    /// Offset of an acknowledgement.
    pub(super) fn ack(&self, ack: Ack) -> usize {
        (3 + self.world_size + 2 * ack.writer + usize::from(ack.common)) * LINE
    }

    /// Bytes of the words, in whole pages.
    pub(super) fn words(&self) -> usize {
        ((3 + 3 * self.world_size) * LINE).next_multiple_of(ALIGN)
    }

    /// Bytes of the ring of `stream`.
    pub(super) fn capacity(&self, stream: RingStream) -> usize {
        match stream {
            RingStream::Common => self.rings.common,
            RingStream::To(_) => self.rings.single,
        }
    }

    /// Range of the ring of `stream`.
    pub(super) fn ring(&self, stream: RingStream) -> Range<usize> {
        let start = match stream {
            RingStream::Common => self.words(),
            RingStream::To(reader) => self.words() + self.rings.common + reader * self.rings.single,
        };
        start..start + self.capacity(stream)
    }

    /// Bytes of the region.
    pub(super) fn bytes(&self) -> usize {
        self.words() + self.rings.common + self.world_size * self.rings.single
    }

    fn index(&self, stream: RingStream) -> usize {
        match stream {
            RingStream::Common => 0,
            RingStream::To(reader) => 1 + reader,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Ack, Layout, RingStream};
    use crate::shared_memory::RingBytes;
    use std::collections::BTreeSet;

    #[test]
    fn words_and_rings_are_disjoint() {
        for world_size in [1, 2, 5, 64, 300] {
            let layout = Layout::new(world_size, RingBytes { single: 1 << 16, common: 1 << 17 }).unwrap();
            let streams = || (0..world_size).map(RingStream::To).chain([RingStream::Common]);
            let acks = (0..world_size)
                .flat_map(|writer| [false, true].map(|common| layout.ack(Ack { writer, common })));
            let words: Vec<usize> = streams()
                .map(|stream| layout.written(stream))
                .chain(acks)
                .chain([layout.sleep(), layout.closed()])
                .collect();
            let different: BTreeSet<usize> = words.iter().map(|word| word / 128).collect();
            assert_eq!(different.len(), words.len());
            assert!(words.iter().all(|word| word + 8 <= layout.words()));
            let mut rings: Vec<_> = streams().map(|stream| layout.ring(stream)).collect();
            rings.sort_by_key(|ring| ring.start);
            assert_eq!(rings[0].start, layout.words());
            assert!(rings.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!(rings[world_size].end, layout.bytes());
        }
    }

    #[test]
    fn sizes_that_cannot_be_mapped_twice_are_refused() {
        for bytes in [0, 1 << 15, (1 << 16) + 1, 3 << 16, 1 << 31] {
            assert_eq!(Layout::new(2, RingBytes { single: bytes, common: 1 << 16 }), None);
            assert_eq!(Layout::new(2, RingBytes { single: 1 << 16, common: bytes }), None);
        }
    }
}
