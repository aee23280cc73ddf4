//! Text of a manifest: written, and read as a catalog.
//!
//! Reading checks everything that can be checked without the other files: the manifest's own hash, that names are plain file names, that
//! pieces lie in their files without sharing bytes, and that each vector's pieces cover the whole tensor. Time grows in proportion to the
//! length of the text, whatever values it holds, and memory to three times that length at most, the text included. Settings are limited to
//! 16 MiB of text, and to values that take about 32 MiB.

use super::catalog::Catalog;
use super::consistency;
use super::manifest::Manifest;
use super::parse::parse;
use super::unique_keys::{self, Refused};
use crate::error::CheckpointError;
use std::fmt::{self, Write as _};
use std::path::Path;

/// Text before and after the hash.
const BEFORE: &str = ",\n\"blake3\": \"";
const AFTER: &str = "\"}\n";
const DIGITS: usize = 64;

impl Manifest {
    /// Returns the manifest as text, with its hash at the end.
    ///
    /// # Panics
    /// Never: all names and numbers can be written as JSON.
    pub fn to_text(&self) -> String {
        let mut text = serde_json::to_string(self).unwrap_or_default();
        assert_eq!(text.pop(), Some('}'), "a struct is an object");
        let hash = blake3::hash(text.as_bytes());
        text + BEFORE + hash.to_hex().as_str() + AFTER
    }

    /// Parses and checks the text of the manifest at `path`.
    pub fn from_text(path: &Path, text: &[u8]) -> Result<Self, CheckpointError> {
        let catalog = Catalog::parse(path, text)?;
        catalog.check(path)?;
        Ok(catalog.unpack())
    }

    /// Checks that the manifest is consistent.
    pub fn check(&self) -> Result<(), CheckpointError> {
        let settings = serde_json::to_vec(&self.settings).unwrap_or_default();
        unique_keys::check_settings(&settings)?;
        consistency::check(&Catalog::pack(self)?)
    }
}

impl Catalog {
    /// Parses and checks the text of the manifest at `path`, and frees the text in between.
    pub(crate) fn from_text(path: &Path, text: Vec<u8>) -> Result<Self, CheckpointError> {
        let mut catalog = Self::parse(path, &text)?;
        drop(text);
        catalog.shrink();
        catalog.check(path)?;
        Ok(catalog)
    }

    /// Parses the text of the manifest at `path`.
    fn parse(path: &Path, text: &[u8]) -> Result<Self, CheckpointError> {
        let syntax = |reason: String| CheckpointError::Syntax { path: path.to_owned(), reason };
        let cut = text.len().checked_sub(TAIL);
        let (body, tail) =
            cut.map(|cut| text.split_at(cut)).ok_or_else(|| syntax("it is too short".into()))?;
        let digits = own_hash(tail).ok_or_else(|| syntax("its last member is not its hash".into()))?;
        let (expected, found) = (String::from_utf8_lossy(digits), blake3::hash(body).to_hex());
        if expected != found.as_str() {
            let what = "the manifest's own bytes".to_owned();
            let (expected, found) = (expected.into_owned(), found.to_string());
            return Err(CheckpointError::Hash { path: path.to_owned(), what, expected, found });
        }
        unique_keys::check_manifest(text).map_err(|refused| match refused {
            Refused::Syntax(error) => syntax(short(&error)),
            Refused::Settings(error) => of_manifest(path, error),
        })?;
        parse(text).map_err(|error| syntax(short(&error)))
    }

    fn check(&self, path: &Path) -> Result<(), CheckpointError> {
        consistency::check(self).map_err(|error| of_manifest(path, error))
    }
}

/// Length of the end of a manifest, which has its hash.
pub(crate) const TAIL: usize = BEFORE.len() + DIGITS + AFTER.len();

/// Returns the digits of a manifest's hash; `tail` is the manifest's end.
pub(crate) fn own_hash(tail: &[u8]) -> Option<&[u8]> {
    tail.strip_prefix(BEFORE.as_bytes()).and_then(|rest| rest.strip_suffix(AFTER.as_bytes()))
}

fn of_manifest(path: &Path, error: CheckpointError) -> CheckpointError {
    CheckpointError::Manifest { path: path.to_owned(), source: Box::new(error) }
}

/// Returns the text of an error, which may repeat any text of the manifest, cut after about a thousand signs.
fn short(error: &serde_json::Error) -> String {
    struct Short(String);

    impl fmt::Write for Short {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            const MOST: usize = 1000;
            match text.char_indices().nth(MOST.saturating_sub(self.0.len())) {
                Some((end, _)) => {
                    self.0.push_str(&text[..end]);
                    Err(fmt::Error)
                }
                None => {
                    self.0.push_str(text);
                    Ok(())
                }
            }
        }
    }

    let mut text = Short(String::new());
    match write!(text, "{error}") {
        Ok(()) => text.0,
        Err(fmt::Error) => text.0 + "...",
    }
}
