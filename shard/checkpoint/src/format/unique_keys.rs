//! First pass over a JSON text, which keeps no values: no object may have a member twice, since programs differ in which one counts, and
//! a manifest's settings must not be too large.

use super::consistency::TEXT;
use super::settings::{MOST_SETTINGS, MOST_VALUES};
use crate::error::CheckpointError;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Estimated bytes of a value in memory, of an object beside its members, and of a member beside its name and value.
const VALUE: u64 = 64;
const OBJECT: u64 = 640;
const MEMBER: u64 = 64;

/// Bytes of names that any text may have.
const FEW: usize = 1 << 18;

/// Checks that each member of each object is unique, nested objects included.
pub(crate) fn check(text: &[u8]) -> Result<(), serde_json::Error> {
    look(&mut KeyPass::new(text), false)
}

/// Reason why a first pass refuses a manifest.
pub(crate) enum Refused {
    Syntax(serde_json::Error),
    Settings(CheckpointError),
}

/// [`check`] of a manifest, whose settings are measured before they are looked at.
pub(crate) fn check_manifest(text: &[u8]) -> Result<(), Refused> {
    let mut pass = KeyPass { longest: TEXT, part: JsonPart::Manifest, ..KeyPass::new(text) };
    let looked = look(&mut pass, true);
    match (pass.large, looked) {
        (Some(large), _) => Err(Refused::Settings(large)),
        (None, looked) => looked.map_err(Refused::Syntax),
    }
}

/// Checks the size of settings that are to be saved; `text` is theirs.
pub(crate) fn check_settings(text: &[u8]) -> Result<(), CheckpointError> {
    let mut pass = KeyPass::new(text);
    short(text.len())?;
    // The text was written from values, so it can be parsed.
    look(&mut pass, false).map_or(Ok(()), |()| light(pass.cost))
}

fn short(text: usize) -> Result<(), CheckpointError> {
    large("as text", MOST_SETTINGS, text as u64)
}

fn light(values: u64) -> Result<(), CheckpointError> {
    large("as values in memory", MOST_VALUES, values)
}

fn large(what: &str, most: u64, found: u64) -> Result<(), CheckpointError> {
    match found <= most {
        true => Ok(()),
        false => Err(CheckpointError::Settings { what: what.to_owned(), most, found }),
    }
}

fn look<'t>(pass: &mut KeyPass<'t>, manifest: bool) -> Result<(), serde_json::Error> {
    let mut from = serde_json::Deserializer::from_slice(pass.text);
    Look { pass, manifest }.deserialize(&mut from)?;
    from.end()
}

/// Name of a member: its place in the text, or among the names with escaped signs, which have the length `u32::MAX`.
type Name = (u32, u32);

struct KeyPass<'t> {
    text: &'t [u8],
    /// Names of the members of all objects that are open.
    names: Vec<Name>,
    escaped: Vec<String>,
    /// Bytes of the escaped names.
    escapes: usize,
    /// Estimated bytes in memory of the values so far.
    cost: u64,
    large: Option<CheckpointError>,
    /// Maximum length of a name or another text in bytes.
    longest: usize,
    part: JsonPart,
}

/// Part of a text, with limits of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JsonPart {
    /// A manifest, settings apart.
    Manifest,
    /// Settings of a manifest.
    Settings,
    Other,
}

/// Any JSON value in which each member of an object is unique; a manifest, if so marked.
struct Look<'p, 't> {
    pass: &'p mut KeyPass<'t>,
    manifest: bool,
}

impl<'t> KeyPass<'t> {
    fn new(text: &'t [u8]) -> Self {
        let (names, escaped) = (Vec::new(), Vec::new());
        KeyPass {
            text,
            names,
            escaped,
            escapes: 0,
            cost: 0,
            large: None,
            longest: usize::MAX,
            part: JsonPart::Other,
        }
    }

    fn name(&self, name: Name) -> &[u8] {
        bytes(self.text, &self.escaped, name)
    }

    /// Returns a name that occurs twice among those of the object that began at these numbers of names, and drops them.
    fn end_object(&mut self, (first, first_escaped): (usize, usize)) -> Option<String> {
        let KeyPass { text, names, escaped, .. } = self;
        let (own, of) = (&mut names[first..], |name: Name| bytes(text, escaped, name));
        // Most objects were written in order.
        if own.windows(2).any(|pair| of(pair[0]) >= of(pair[1])) {
            own.sort_unstable_by(|&a, &b| of(a).cmp(of(b)));
        }
        let twice = own.windows(2).find(|pair| of(pair[0]) == of(pair[1]));
        let twice = twice.map(|pair| String::from_utf8_lossy(of(pair[0])).into_owned());
        names.truncate(first);
        self.escapes -= escaped.drain(first_escaped..).map(|name| room(&name)).sum::<usize>();
        twice
    }

    /// Counts a text.
    fn count<E: Error>(&mut self, len: usize) -> Result<(), E> {
        self.cost += len as u64;
        match len <= self.longest {
            true => Ok(()),
            false => Err(E::custom(format_args!("a text has {len} bytes, {} are the most", self.longest))),
        }
    }

    /// Measures the value behind the member's name that ends at `at`.
    fn measure(&mut self, at: usize) -> Result<(), CheckpointError> {
        let rest = self.text.get(at + 1..).unwrap_or_default();
        let value = rest.iter().position(|&byte| byte == b':').map_or(&[][..], |colon| &rest[colon + 1..]);
        short(length(value))
    }
}

/// Returns the bytes in memory of an escaped name, with its part of a growing vector.
fn room(name: &str) -> usize {
    size_of::<String>() + name.len().max(32)
}

/// Returns the bytes of a name.
fn bytes<'b>(text: &'b [u8], escaped: &'b [String], (at, len): Name) -> &'b [u8] {
    match len {
        u32::MAX => escaped.get(at as usize).map_or(&[], |name| name.as_bytes()),
        _ => text.get(at as usize..).and_then(|text| text.get(..len as usize)).unwrap_or_default(),
    }
}

/// Returns the length of the JSON value at the beginning of `text`, without a check of its syntax.
fn length(text: &[u8]) -> usize {
    let (mut depth, mut quoted, mut skip) = (0usize, false, false);
    for (at, byte) in text.iter().enumerate() {
        match (quoted, byte) {
            _ if skip => skip = false,
            (true, b'\\') => skip = true,
            (_, b'"') => quoted = !quoted,
            (true, _) => {}
            (false, b'[' | b'{') => depth += 1,
            (false, b']' | b'}') if depth > 1 => depth -= 1,
            (false, b']' | b'}') => return at + 1,
            (false, b',') if depth == 0 => return at,
            _ => {}
        }
    }
    text.len()
}

impl<'t> DeserializeSeed<'t> for Look<'_, 't> {
    type Value = ();

    fn deserialize<D: Deserializer<'t>>(self, from: D) -> Result<(), D::Error> {
        self.pass.cost += VALUE;
        from.deserialize_any(self)
    }
}

impl<'t> Visitor<'t> for Look<'_, 't> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'t>>(self, mut map: A) -> Result<(), A::Error> {
        let Look { pass, manifest } = self;
        let first = (pass.names.len(), pass.escaped.len());
        pass.cost += OBJECT;
        while let Some(name) = map.next_key_seed(Key(pass))? {
            let settings = manifest && pass.name(name) == b"settings";
            if settings {
                pass.cost = 0;
                if let Err(error) = pass.measure(name.0 as usize + name.1 as usize) {
                    pass.large = Some(error);
                    return Err(A::Error::custom("the settings are too large"));
                }
            }
            let limits = (pass.longest, pass.part);
            if settings {
                (pass.longest, pass.part) = (usize::MAX, JsonPart::Settings);
            }
            map.next_value_seed(Look { pass, manifest: false })?;
            (pass.longest, pass.part) = limits;
            if settings && let Err(error) = light(pass.cost) {
                pass.large = Some(error);
                return Err(A::Error::custom("the settings are too large"));
            }
        }
        match pass.end_object(first) {
            Some(name) => Err(A::Error::custom(format_args!("the member {name:?} is there twice"))),
            None => Ok(()),
        }
    }

    fn visit_seq<A: SeqAccess<'t>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(Look { pass: self.pass, manifest: false })?.is_some() {}
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.pass.count(text.len())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// Name of a member, which is kept.
struct Key<'p, 't>(&'p mut KeyPass<'t>);

impl<'t> DeserializeSeed<'t> for Key<'_, 't> {
    type Value = Name;

    fn deserialize<D: Deserializer<'t>>(self, from: D) -> Result<Name, D::Error> {
        from.deserialize_str(self)
    }
}

impl<'t> Visitor<'t> for Key<'_, 't> {
    type Value = Name;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a member's name")
    }

    fn visit_borrowed_str<E: Error>(self, name: &'t str) -> Result<Name, E> {
        let at = (name.as_ptr() as usize).checked_sub(self.0.text.as_ptr() as usize);
        match (at.and_then(|at| u32::try_from(at).ok()), u32::try_from(name.len())) {
            (Some(at), Ok(len)) if self.0.name((at, len)) == name.as_bytes() => self.keep((at, len)),
            _ => self.visit_str(name),
        }
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Name, E> {
        let at = self.0.escaped.len() as u32;
        self.0.escaped.push(name.to_owned());
        self.0.escapes += room(name);
        self.keep((at, u32::MAX))
    }
}

impl Key<'_, '_> {
    fn keep<E: Error>(self, name: Name) -> Result<Name, E> {
        let len = self.0.name(name).len();
        self.0.cost += MEMBER;
        self.0.count::<E>(len)?;
        self.0.names.push(name);
        let KeyPass { text, names, escapes, cost, large, part, .. } = self.0;
        match part {
            // Growing vectors take three times as much for a moment. Members of a manifest are longer than the places of their names.
            JsonPart::Manifest if names.len() * size_of::<Name>() + *escapes > text.len() / 4 + FEW => {
                Err(E::custom("its names take more memory than a manifest's"))
            }
            JsonPart::Settings if light(*cost).is_err() => {
                *large = light(*cost).err();
                Err(E::custom("the settings are too large"))
            }
            _ => Ok(name),
        }
    }
}
