//! Proofs of the job token, and the keys of an authenticated connection.
//!
//! A connection begins with the rank's hello (its nonce and its claim) and the store's nonce. All other values are HMAC-SHA256,
//! under the token, of a label and the hash of those two: the store's proof, the rank's proof, and a key for each direction. All
//! four cover both nonces and the claim, so recorded values cannot be reused.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// Bytes of a nonce.
pub(super) const NONCE: usize = 32;
/// Bytes of a seal and of a proof.
pub(super) const SEAL: usize = 32;

pub(super) type Nonce = [u8; NONCE];
pub(super) type Proof = [u8; SEAL];

/// Key of HMAC-SHA256.
#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl Key {
    /// Derives the key from a token of any length; from no bytes if the job has no token.
    pub(super) fn of_token(token: &[u8]) -> Self {
        let hash = Sha256::new().chain_update(b"meshstep rendezvous 1: token").chain_update(token);
        Key(hash.finalize().into())
    }

    pub(super) fn seal(&self, parts: &[&[u8]]) -> [u8; SEAL] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Returns true if `seal` is that of `parts`, in constant time.
    pub(super) fn opens(&self, parts: &[&[u8]], seal: &[u8]) -> bool {
        self.mac(parts).verify_slice(seal).is_ok()
    }

    /// Callers ensure that two different lists of parts never concatenate to the same bytes.
    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        // The key fills one block of the hash; HMAC pads it with zeros anyway.
        let mut block = [0; 64];
        block[..self.0.len()].copy_from_slice(&self.0);
        let mac = <Hmac<Sha256> as KeyInit>::new(&block.into());
        parts.iter().fold(mac, |mac, part| mac.chain_update(part))
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Values derived from the token and the first bytes of a connection.
#[derive(Debug)]
pub(super) struct Proofs {
    token: Key,
    hash: [u8; 32],
}

impl Proofs {
    /// `hello` is the rank's first payload, byte for byte, including its nonce; `nonce` is the store's.
    pub(super) fn new(token: &Key, hello: &[u8], nonce: &Nonce) -> Self {
        let hash = Sha256::new().chain_update(nonce).chain_update(hello);
        Proofs { token: token.clone(), hash: hash.finalize().into() }
    }

    pub(super) fn of_store(&self) -> Proof {
        self.token.seal(&self.parts(b"store's proof"))
    }

    pub(super) fn of_rank(&self) -> Proof {
        self.token.seal(&self.parts(b"rank's proof."))
    }

    pub(super) fn is_of_store(&self, proof: &Proof) -> bool {
        self.token.opens(&self.parts(b"store's proof"), proof)
    }

    pub(super) fn is_of_rank(&self, proof: &Proof) -> bool {
        self.token.opens(&self.parts(b"rank's proof."), proof)
    }

    pub(super) fn key_to_store(&self) -> Key {
        Key(self.token.seal(&self.parts(b"key to store.")))
    }

    pub(super) fn key_to_rank(&self) -> Key {
        Key(self.token.seal(&self.parts(b"key to rank..")))
    }

    /// Labels have equal lengths, so that label and hash cannot be split differently.
    fn parts<'a>(&'a self, label: &'a [u8; 13]) -> [&'a [u8]; 2] {
        [label, &self.hash]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test case 1 with its 20 bytes of key, and FIPS 180-2's "abc".
    #[test]
    fn the_crates_compute_what_the_standards_say() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let mut key = [0; 32];
        key[..20].fill(0x0b);
        assert_eq!(
            hex(&Key(key).seal(&[b"Hi ", b"There"])),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"
        );
        assert_eq!(
            hex(&Sha256::digest(b"abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn all_that_is_derived_differs_and_depends_on_every_input() {
        let make = |token: &[u8], hello: &[u8], nonce: u8| {
            let proofs = Proofs::new(&Key::of_token(token), hello, &[nonce; NONCE]);
            [proofs.of_store(), proofs.of_rank(), proofs.key_to_store().0, proofs.key_to_rank().0]
        };
        let inputs: [(&[u8], &[u8], u8); 5] = [
            (b"token", b"hello", 1),
            (b"other", b"hello", 1),
            (b"token", b"jello", 1),
            (b"token", b"hello", 2),
            (b"", b"hello", 1),
        ];
        let all: Vec<[u8; 32]> =
            inputs.iter().flat_map(|(token, hello, nonce)| make(token, hello, *nonce)).collect();
        for (i, one) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|other| one != other), "{i}");
        }
    }

    #[test]
    fn a_proof_is_its_own_side_s_only() {
        let proofs = Proofs::new(&Key::of_token(b"token"), b"hello", &[0; NONCE]);
        assert!(proofs.is_of_store(&proofs.of_store()) && proofs.is_of_rank(&proofs.of_rank()));
        assert!(!proofs.is_of_store(&proofs.of_rank()) && !proofs.is_of_rank(&proofs.of_store()));
    }
}
