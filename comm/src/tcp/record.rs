//! Header of a record: its length, its number and checksums. Arithmetic only: no socket, no buffer.

use twox_hash::XxHash3_64;

/// Bytes of a header.
pub(super) const HEADER: usize = 24;
/// Longest payload of a plain record: fills half of a usual L2 cache, and makes a system call's own cost small.
pub(super) const RECORD: usize = 128 << 10;

/// Seed of a header's own checksum, so that zeros are no header.
const SEED: u64 = u64::from_le_bytes(*b"meshstep");

/// Fields of a header, in the order of their bytes; the header's own checksum follows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordHeader {
    /// Bytes that follow the header, at most [`RECORD`].
    pub(super) len: usize,
    /// Number of the record in its direction, modulo 2^32.
    pub(super) sequence: u32,
    /// Checksum of a plain payload; 0 for a sealed one, which has its tag.
    pub(super) checksum: u64,
}

impl RecordHeader {
    pub(super) fn encode(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&(self.len as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.checksum.to_le_bytes());
        let own = XxHash3_64::oneshot_with_seed(SEED, &bytes[..16]);
        bytes[16..].copy_from_slice(&own.to_le_bytes());
        bytes
    }

    /// `None` if the bytes are no header of this version, or its length is above the limit.
    pub(super) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let (fields, own) = bytes.split_last_chunk::<8>()?;
        if XxHash3_64::oneshot_with_seed(SEED, fields) != u64::from_le_bytes(*own) {
            return None;
        }
        let (len, rest) = fields.split_first_chunk::<4>()?;
        let (sequence, checksum) = rest.split_first_chunk::<4>()?;
        let len = u32::from_le_bytes(*len) as usize;
        let (sequence, checksum) =
            (u32::from_le_bytes(*sequence), u64::from_le_bytes(checksum.try_into().ok()?));
        (len <= RECORD).then_some(RecordHeader { len, sequence, checksum })
    }
}

/// Returns the checksum of a plain record's payload; the same payload has another one in another record.
pub(super) fn checksum(payload: &[u8], sequence: u32) -> u64 {
    XxHash3_64::oneshot_with_seed(SEED ^ u64::from(sequence), payload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_survive_the_way_and_no_altered_bit_does(
            len in 0..=RECORD,
            sequence in any::<u32>(),
            checksum in any::<u64>(),
            bit in 0..HEADER * 8,
        ) {
            let header = RecordHeader { len, sequence, checksum };
            let mut bytes = header.encode();
            prop_assert_eq!(RecordHeader::decode(&bytes), Some(header));
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(RecordHeader::decode(&bytes), None);
        }
    }

    #[test]
    fn long_records_and_zeros_are_no_headers() {
        let long = RecordHeader { len: RECORD + 1, sequence: 0, checksum: 0 };
        assert_eq!(RecordHeader::decode(&long.encode()), None);
        assert_eq!(RecordHeader::decode(&[0; HEADER]), None);
    }

    #[test]
    fn equal_payloads_of_two_records_have_different_checksums() {
        assert_ne!(checksum(&[7; 100], 1), checksum(&[7; 100], 2));
    }
}
