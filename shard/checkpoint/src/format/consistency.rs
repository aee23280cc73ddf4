//! Check that a catalog is consistent: everything that can be checked without the files of the step. Time and memory grow in proportion
//! to the catalog, whatever values it holds.

use super::catalog::{Catalog, SlotRef, StoredRef, TensorRef};
use super::coverage::{self, Located};
use super::dims::{MOST_DIMS, too_many};
use super::manifest::{FORMAT, Type, WINDOW, Whose};
use crate::error::CheckpointError;
use std::fmt;

/// Maximum length in bytes of a name, which errors repeat on every rank, and of any other text outside of the settings.
const NAME: usize = 1 << 12;
pub(crate) const TEXT: usize = 1 << 16;

/// Stored bytes: file, first byte, end, and the number of the entry in the order of the catalog.
type Taken = (u32, u64, u64, u32);

/// Checks a catalog.
pub(crate) fn check(catalog: &Catalog) -> Result<(), CheckpointError> {
    if catalog.format != FORMAT {
        return Err(CheckpointError::Format { found: catalog.format, known: FORMAT });
    }
    short("a mesh", &catalog.mesh, TEXT)?;
    check_files(catalog)?;
    for tensor in catalog.tensors() {
        short("a tensor", tensor.name, NAME)?;
        for (name, slot) in tensor.slots() {
            short("a slot", name, NAME)?;
            check_slot(catalog, &tensor, name, &slot)?;
        }
    }
    for (name, stored) in catalog.blobs() {
        short("a blob", name, NAME)?;
        check_stored(catalog, &stored).map_err(|reason| contradiction(Whose::Blob(name), reason))?;
    }
    check_apart(catalog)
}

fn short(what: &str, name: &str, most: usize) -> Result<(), CheckpointError> {
    match name.len() <= most {
        true => Ok(()),
        false => {
            let begin: String = name.chars().take(40).collect();
            let reason = format!("it has {} bytes, {most} are the most", name.len());
            Err(contradiction(format_args!("the name of {what} that begins with {begin:?}"), reason))
        }
    }
}

fn check_files(catalog: &Catalog) -> Result<(), CheckpointError> {
    let name = |index: u32| catalog.file(index as usize).map_or("", |(name, ..)| name);
    for (name, _, blake3) in catalog.files() {
        short("a file", name, NAME)?;
        short("a hash of a file", blake3, TEXT)?;
    }
    let mut all: Vec<u32> = (0..catalog.files().len() as u32).collect();
    if let Some(&wrong) = all.iter().find(|&&index| !plain(name(index))) {
        let reason = "a file's name is letters, digits, '.', '-' and '_', and begins with none of the signs";
        return Err(contradiction(format_args!("file {:?}", name(wrong)), reason.to_owned()));
    }
    all.sort_unstable_by_key(|&index| name(index));
    match all.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
        Some(pair) => {
            Err(contradiction(format_args!("file {:?}", name(pair[0])), "it is listed twice".to_owned()))
        }
        None => Ok(()),
    }
}

fn check_slot(
    catalog: &Catalog,
    tensor: &TensorRef<'_>,
    slot: &str,
    entry: &SlotRef<'_>,
) -> Result<(), CheckpointError> {
    let whose = Whose::Slot { tensor: tensor.name, slot };
    let shape = tensor.shape();
    if shape.len() > MOST_DIMS {
        return Err(contradiction(whose, too_many(shape.len())));
    }
    let mut located = Vec::with_capacity(entry.len());
    for piece in entry.pieces() {
        let [start, end] = piece.range;
        short("a vector of a file", piece.key, TEXT)?;
        check_piece(catalog, entry.dtype, end.saturating_sub(start), &piece.stored)
            .map_err(|reason| contradiction(whose, reason))?;
        located.push(Located { offsets: piece.offsets, extents: piece.extents, range: start..end });
    }
    let (tensor, slot) = (tensor.name.to_owned(), slot.to_owned());
    coverage::check_located(&shape, located).map_err(|source| CheckpointError::Cover { tensor, slot, source })
}

fn check_piece(catalog: &Catalog, dtype: Type, len: u64, stored: &StoredRef<'_>) -> Result<(), String> {
    let bytes = stored.bytes;
    if len.checked_mul(dtype.size()) != Some(bytes) {
        return Err(format!("{len} elements of {dtype:?} are not {bytes} bytes"));
    }
    check_stored(catalog, stored)
}

fn check_stored(catalog: &Catalog, stored: &StoredRef<'_>) -> Result<(), String> {
    let StoredRef { file, at, bytes, hashes } = *stored;
    let Some((name, all, _)) = catalog.file(file) else {
        return Err(format!("there are {} files, and none with index {file}", catalog.files().len()));
    };
    if at.checked_add(bytes).is_none_or(|end| end > all) {
        return Err(format!("{bytes} bytes from {at} on do not lie in {name:?}, which has {all}"));
    }
    let windows = bytes.div_ceil(WINDOW);
    match hashes.len() as u64 == windows {
        true => Ok(()),
        false => Err(format!("{bytes} bytes have {windows} windows, not {}", hashes.len())),
    }
}

/// Checks that no two stored ranges share bytes.
fn check_apart(catalog: &Catalog) -> Result<(), CheckpointError> {
    let span = |(i, (_, stored)): (usize, (Whose<'_>, StoredRef<'_>))| {
        let end = stored.at + stored.bytes;
        (end > stored.at).then_some((stored.file as u32, stored.at, end, i as u32))
    };
    // The number is counted first: a vector that grows would hold the spans twice.
    let mut taken: Vec<Taken> = Vec::with_capacity(catalog.stored().count());
    taken.extend(catalog.stored().enumerate().filter_map(span));
    taken.sort_unstable();
    let Some(pair) = taken.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[0].2 > pair[1].1) else {
        return Ok(());
    };
    let [first, second] = [pair[0], pair[1]].map(|(.., i)| catalog.stored().nth(i as usize));
    let name =
        |found: Option<(Whose<'_>, StoredRef<'_>)>| found.map_or(String::new(), |(of, _)| of.to_string());
    Err(contradiction(name(second), format!("it shares bytes with {}", name(first))))
}

/// Returns true for a plain file name, which cannot lead out of its folder: letters, digits, `.`, `-` and `_`, beginning with a letter or
/// digit.
fn plain(name: &str) -> bool {
    let first = name.bytes().next().is_some_and(|c| c.is_ascii_alphanumeric());
    first && name.len() <= 200 && name.bytes().all(|c| c.is_ascii_alphanumeric() || b".-_".contains(&c))
}

fn contradiction(what: impl fmt::Display, reason: String) -> CheckpointError {
    CheckpointError::Contradiction { what: what.to_string(), reason }
}
