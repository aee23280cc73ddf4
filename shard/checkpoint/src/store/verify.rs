//! Check of every byte of a saved step: reads each file once, from its first byte to its last, for all hashes at the same time.

use super::reader::{Saved, SavedFile, unreadable};
use crate::error::CheckpointError;
use crate::format::catalog::{PieceRef, StoredRef};
use crate::format::header::{self, Header};
use crate::format::manifest::{Type, WINDOW, Whose};

/// Totals of a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Number of files that could be opened and have the length that the manifest gives.
    pub files: usize,
    /// Number of bytes read and hashed.
    pub bytes: u64,
    /// Number of tensors with vectors that are covered exactly.
    pub tensors: usize,
    /// Number of their vectors.
    pub slots: usize,
    /// Number of windows compared with their own hashes.
    pub windows: u64,
}

/// Stretch of a file, at most a window long: a window of stored bytes with its offset in them, or bytes that belong to no vector.
struct Stretch<'m> {
    at: u64,
    len: u64,
    window: Option<(Whose<'m>, StoredRef<'m>, u64)>,
}

impl Saved {
    /// Checks every byte of every file against the manifest, and returns the first damage as an error. The manifest was checked when it was
    /// read.
    pub fn verify(&self) -> Result<Checked, CheckpointError> {
        let mut first = None;
        let checked = self.damage(|error| {
            first.get_or_insert(error);
        });
        first.map_or(Ok(checked), Err)
    }

    /// Checks everything even after damage, and calls `report` for each error.
    pub fn damage(&self, mut report: impl FnMut(CheckpointError)) -> Checked {
        let catalog = self.catalog();
        let slots = catalog.tensors().map(|tensor| tensor.slots().count()).sum();
        let mut checked = Checked { tensors: catalog.count(), slots, ..Checked::default() };
        let mut stored: Vec<_> = catalog.stored().filter(|(_, stored)| stored.bytes > 0).collect();
        stored.sort_by_key(|(_, stored)| (stored.file, stored.at));
        let mut pieces: Vec<_> = catalog.pieces().collect();
        pieces.sort_by_key(|(.., piece)| piece.stored.file);
        let (mut stored, mut pieces) = (&stored[..], &pieces[..]);
        for (index, (_, bytes, blake3)) in catalog.files().enumerate() {
            let (here, described);
            (here, stored) = stored.split_at(stored.partition_point(|(_, stored)| stored.file == index));
            (described, pieces) =
                pieces.split_at(pieces.partition_point(|(.., piece)| piece.stored.file == index));
            match self.file(index) {
                Ok(file) => {
                    checked.files += 1;
                    check_file(&file, (bytes, blake3), here, &mut checked, &mut report);
                    check_header(&file, bytes, described, &mut report);
                }
                Err(error) => report(of_all(here, error)),
            }
        }
        checked
    }
}

/// Checks all hashes of a file. If only the file's own hash differs, the damage lies outside of all windows.
fn check_file(
    file: &SavedFile,
    (bytes, expected): (u64, &str),
    here: &[(Whose<'_>, StoredRef<'_>)],
    checked: &mut Checked,
    report: &mut impl FnMut(CheckpointError),
) {
    let (mut hash, mut whole) = (blake3::Hasher::new(), true);
    let mut room = vec![0; WINDOW.min(bytes) as usize];
    for Stretch { at, len, window } in stretches(here, bytes) {
        let room = &mut room[..len as usize];
        let read = match window {
            Some((whose, stored, start)) => file.window(&stored, start, room, &whose.to_string()),
            None => file.fill(at, room),
        };
        match read {
            Ok(()) => {}
            Err(error @ CheckpointError::Hash { .. }) => {
                whole = false;
                report(error);
            }
            Err(error) => {
                let what = window.map_or_else(|| names(here), |(whose, ..)| whose.to_string());
                return report(unreadable(&what, error));
            }
        }
        hash.update(room);
        checked.bytes += len;
        checked.windows += u64::from(window.is_some());
    }
    let (expected, found) = (expected.to_owned(), hash.finalize().to_hex().to_string());
    if whole && expected != found {
        let (path, what) = (file.path().to_owned(), "all bytes".to_owned());
        report(CheckpointError::Hash { path, what, expected, found });
    }
}

/// Divides a file into stretches from its first byte to its last. `here` ascends and shares no bytes.
fn stretches<'m>(here: &[(Whose<'m>, StoredRef<'m>)], end: u64) -> impl Iterator<Item = Stretch<'m>> {
    let mut before = 0;
    let vectors = here.iter().map(|&(whose, stored)| (stored.at, stored.bytes, Some((whose, stored))));
    vectors.chain([(end, 0, None)]).flat_map(move |(at, bytes, vector)| {
        let gap = split(before, at).map(|(_, at, len)| Stretch { at, len, window: None });
        before = at + bytes;
        let windows = split(at, before).map(move |(start, at, len)| {
            let window = vector.map(|(whose, stored)| (whose, stored, start));
            Stretch { at, len, window }
        });
        gap.chain(windows)
    })
}

/// Divides a range of bytes into windows, each with its offset in the range, its offset in the file, and its length.
fn split(from: u64, to: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    let starts = (from..to).step_by(WINDOW as usize);
    starts.map(move |at| (at - from, at, WINDOW.min(to - at)))
}

/// Adds the owners of a file's bytes to an error about the whole file.
fn of_all(here: &[(Whose<'_>, StoredRef<'_>)], error: CheckpointError) -> CheckpointError {
    if here.is_empty() { error } else { unreadable(&names(here), error) }
}

fn names(here: &[(Whose<'_>, StoredRef<'_>)]) -> String {
    match here {
        [] => "the bytes between vectors".to_owned(),
        [(one, _)] => one.to_string(),
        [(first, _), others @ ..] => format!("{first}, with {} more pieces,", others.len()),
    }
}

/// Calls `report` for each of `pieces` that the header of `file`, a file of `bytes` bytes, lacks or describes differently.
fn check_header(
    file: &SavedFile,
    bytes: u64,
    pieces: &[(Whose<'_>, Type, PieceRef<'_>)],
    report: &mut impl FnMut(CheckpointError),
) {
    let error = |whose: Whose<'_>, reason: String| {
        let (path, what) = (file.path().to_owned(), whose.to_string());
        CheckpointError::Header { path, what, reason }
    };
    let Some((first, ..)) = pieces.first() else { return };
    let fill = |at, room: &mut [u8]| file.fill(at, room).map_err(|unread| error(*first, unread.to_string()));
    let Header { data, entries, .. } = match header::read(bytes, fill, |reason| error(*first, reason)) {
        Ok(header) => header,
        Err(error) => return report(error),
    };
    for (whose, dtype, piece) in pieces {
        if let Err(reason) = header::agrees(entries.get(piece.key), *dtype, piece, data) {
            report(error(*whose, reason));
        }
    }
}
