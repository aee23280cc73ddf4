//! Catalog of a step on all ranks: rank 0 has read the manifest, and the others receive its contents in chunks.

use super::ranks::Ranks;
use crate::error::CheckpointError;
use crate::failure::Error;
use crate::format::catalog::{Catalog, Records};
use crate::format::run_id::RunId;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Number of words that travel at once. A rank holds a few copies of them, and no second copy of a catalog.
const CHUNK: usize = (1 << 20) / size_of::<u64>();

/// Small members of a catalog, which travel as text.
#[derive(Serialize, Deserialize)]
struct Head<S> {
    format: u32,
    step: u64,
    run: Option<RunId>,
    mesh: String,
    settings: S,
    hash: String,
}

impl Ranks {
    /// Returns rank 0's catalog, with the hash of its manifest, on every rank. Rank 0 alone passes it. Collective.
    pub(crate) fn share_catalog(&self, own: Option<(Catalog, String)>) -> Result<(Catalog, String), Error> {
        let text = own.as_ref().map_or(Vec::new(), text_of_head);
        let received = self.share_bytes(text.len(), &text)?;
        drop(text);
        let head = match &own {
            Some(_) => Ok(None),
            None => serde_json::from_slice(&received).map(Some).map_err(CheckpointError::memory),
        };
        let (catalog, hash) = own.unwrap_or_default();
        let Catalog { records, tensors, .. } = &catalog;
        let received = Records {
            bytes: self.share_bytes(records.bytes.len(), &records.bytes)?,
            files: self.share_starts(&records.files)?,
            blobs: self.share_starts(&records.blobs)?,
        };
        let tensors = self.share_starts(tensors)?;
        let Some(head) = self.agree(head)? else { return Ok((catalog, hash)) };
        let Head { format, step, run, mesh, settings, hash } = head;
        let (settings, records): (BTreeMap<String, Value>, _) = (settings, Arc::new(received));
        Ok((Catalog { format, step, run, mesh, settings: Arc::new(settings), records, tensors }, hash))
    }

    /// Returns rank 0's bytes on the other ranks. Collective.
    fn share_bytes(&self, len: usize, own: &[u8]) -> Result<Vec<u8>, Error> {
        let word = |i: usize| {
            let mut word = [0; 8];
            let bytes = &own[8 * i..own.len().min(8 * i + 8)];
            word[..bytes.len()].copy_from_slice(bytes);
            word
        };
        self.share(len, word, |word| word)
    }

    /// Returns rank 0's starts on the other ranks. Collective.
    fn share_starts(&self, own: &[u32]) -> Result<Vec<u32>, Error> {
        let half = |i: usize| own.get(i).copied().unwrap_or_default().to_le_bytes();
        let word = |i: usize| {
            let mut word = [0; 8];
            word[..4].copy_from_slice(&half(2 * i));
            word[4..].copy_from_slice(&half(2 * i + 1));
            word
        };
        let halves = |[a, b, c, d, e, f, g, h]: [u8; 8]| {
            [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
        };
        self.share(own.len(), word, halves)
    }

    /// Returns rank 0's `len` elements on the other ranks, which pass any `len`: `N` elements make a word, and the reverse. Collective.
    fn share<T, const N: usize>(
        &self,
        len: usize,
        word: impl Fn(usize) -> [u8; 8],
        elements: impl Fn([u8; 8]) -> [T; N],
    ) -> Result<Vec<T>, Error> {
        let (first, len) = (self.rank() == 0, self.first_word(len as u64)? as usize);
        let mut received = Vec::new();
        let reserved = if first { Ok(()) } else { received.try_reserve_exact(len.next_multiple_of(N)) };
        self.agree(reserved.map_err(CheckpointError::memory))?;
        let count = len.div_ceil(N);
        let mut words = vec![0; count.min(CHUNK)];
        for start in (0..count).step_by(CHUNK) {
            let words = &mut words[..CHUNK.min(count - start)];
            if first {
                words.iter_mut().zip(start..).for_each(|(to, i)| *to = u64::from_le_bytes(word(i)));
            }
            self.first_words(words)?;
            if !first {
                received.extend(words.iter().flat_map(|word| elements(word.to_le_bytes())));
            }
        }
        received.truncate(len);
        Ok(received)
    }
}

fn text_of_head((catalog, hash): &(Catalog, String)) -> Vec<u8> {
    let Catalog { format, step, run, mesh, settings, .. } = catalog;
    let (mesh, hash) = (mesh.clone(), hash.clone());
    // Settings were parsed from text, or can be: they have no other keys than strings.
    let head = Head { format: *format, step: *step, run: *run, mesh, settings: &**settings, hash };
    serde_json::to_vec(&head).unwrap_or_default()
}
