//! Cipher of one direction of a connection: Noise's cipher state, with a new key after every [`REKEY`] records.

use snow::params::CipherChoice;
use snow::resolvers::{CryptoResolver, DefaultResolver};
use std::fmt;

/// Bytes that a record is longer than its plaintext.
const TAG: usize = 16;
/// Records under one key. Both sides count them, so no message announces the change.
const REKEY: u64 = 1 << 16;

/// Seals or opens the records of one direction of a connection, in order.
pub struct Cipher {
    cipher: Box<dyn snow::types::Cipher>,
    /// Number of the next record.
    nonce: u64,
    rekey: u64,
}

/// A record was changed, repeated, dropped or made without the key.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a record is forged; end the connection")]
pub struct Forged;

meshstep_tensor::debug_is_display!(Forged);

impl Cipher {
    /// Longest plaintext of a record: Noise bounds a record to 65,535 bytes.
    pub const MAX: usize = u16::MAX as usize - TAG;
    /// Bytes that a record is longer than its plaintext.
    pub const TAG: usize = TAG;

    /// `None` if the cipher is not compiled in.
    pub(super) fn new(key: &[u8; 32]) -> Option<Self> {
        let mut cipher = DefaultResolver.resolve_cipher(&CipherChoice::ChaChaPoly)?;
        cipher.set(key);
        Some(Cipher { cipher, nonce: 0, rekey: REKEY })
    }

    /// Appends the record of `plain` to `out`; it is 16 bytes longer.
    ///
    /// # Panics
    /// If `plain` is longer than [`MAX`](Self::MAX).
    pub fn seal(&mut self, plain: &[u8], out: &mut Vec<u8>) {
        assert!(plain.len() <= Self::MAX, "{} bytes do not fit a record", plain.len());
        let from = out.len();
        out.resize(from + plain.len() + TAG, 0);
        self.cipher.encrypt(self.nonce, &[], plain, &mut out[from..]);
        self.advance();
    }

    /// Opens the next record, in constant time.
    ///
    /// # Errors
    /// [`Forged`], after which the connection is unusable.
    pub fn open(&mut self, record: &[u8]) -> Result<Vec<u8>, Forged> {
        let mut plain = vec![0; record.len().checked_sub(TAG).ok_or(Forged)?];
        self.open_into(record, &mut plain)?;
        Ok(plain)
    }

    /// Like [`open`](Self::open), into the beginning of `plain`, which has room for the plaintext; returns its length.
    ///
    /// # Errors
    /// [`Forged`], after which the connection is unusable.
    ///
    /// # Panics
    /// If `plain` is shorter than the plaintext.
    pub fn open_into(&mut self, record: &[u8], plain: &mut [u8]) -> Result<usize, Forged> {
        let len = record.len().checked_sub(TAG).ok_or(Forged)?;
        self.cipher.decrypt(self.nonce, &[], record, &mut plain[..len]).map_err(|_| Forged)?;
        self.advance();
        Ok(len)
    }

    fn advance(&mut self) {
        self.nonce += 1;
        if self.nonce.is_multiple_of(self.rekey) {
            self.cipher.rekey();
        }
    }
}

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cipher(record {})", self.nonce)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(rekey: u64) -> [Cipher; 2] {
        [(); 2].map(|()| Cipher { rekey, ..Cipher::new(&[7; 32]).unwrap() })
    }

    #[test]
    fn both_sides_change_the_key_at_the_same_record() {
        let [mut sender, mut receiver] = pair(3);
        let mut old = Cipher::new(&[7; 32]).unwrap();
        for number in 0..10u8 {
            let mut record = Vec::new();
            sender.seal(&[number; 5], &mut record);
            assert_eq!(receiver.open(&record), Ok(vec![number; 5]));
            // The first key opens the first three records alone.
            assert_eq!(old.open(&record).is_ok(), number < 3, "{number}");
        }
    }

    #[test]
    fn a_record_below_its_tag_is_forged() {
        let [_, mut receiver] = pair(3);
        for len in 0..TAG {
            assert_eq!(receiver.open(&vec![0; len]), Err(Forged));
        }
    }
}
