//! Second pass over a manifest's text: its members become records of a catalog as they are read, and no tree of values exists.

use super::catalog::{Catalog, Records, put_piece, put_slot};
use super::dims::{Dims, MOST_DIMS, too_many};
use super::manifest::{FileEntry, PieceEntry, Stored, Type};
use super::run_id::RunId;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Parses a manifest, in which no member is there twice.
pub(crate) fn parse(text: &[u8]) -> Result<Catalog, serde_json::Error> {
    let mut records = Records::default();
    // Records that outgrow this are mostly names, which double it once.
    records.bytes.reserve_exact(text.len() / 2);
    let mut from = serde_json::Deserializer::from_slice(text);
    let catalog = Seed(Top, &mut records).deserialize(&mut from)?;
    from.end()?;
    let Catalog { format, step, run, mesh, settings, mut tensors, .. } = catalog;
    let name = |start: u32| records.name(start);
    tensors.sort_unstable_by_key(|&start| name(start));
    let mut blobs = std::mem::take(&mut records.blobs);
    blobs.sort_unstable_by_key(|&start| records.name(start));
    records.blobs = blobs;
    Ok(Catalog { format, step, run, mesh, settings, records: Arc::new(records), tensors })
}

/// Object or array whose members are written to `W`, or a value that is built.
struct Seed<S, W>(S, W);

/// Kinds of values.
struct Top;
struct Files;
struct Tensors;
struct Blobs;
struct Tensor<'n>(&'n str);
struct Slots;
struct SlotSeed;
struct Pieces;

/// Implements `DeserializeSeed` and the beginning of `Visitor` for a kind.
macro_rules! kind {
    ($kind:ty, $room:ty, $value:ty, $method:ident, $expected:literal, $visit:item) => {
        impl<'de> DeserializeSeed<'de> for Seed<$kind, &mut $room> {
            type Value = $value;

            fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<$value, D::Error> {
                from.$method(self)
            }
        }

        impl<'de> Visitor<'de> for Seed<$kind, &mut $room> {
            type Value = $value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str($expected)
            }

            $visit
        }
    };
}

kind!(
    Top,
    Records,
    Catalog,
    deserialize_map,
    "a manifest",
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Catalog, A::Error> {
        const MEMBERS: &[&str] =
            &["format", "step", "run", "mesh", "files", "tensors", "settings", "blobs", "blake3"];
        let Seed(_, records) = self;
        let (mut format, mut step, mut mesh, mut tensors) = (None, None, None, None);
        let mut run: Option<RunId> = None;
        let (mut files, mut blobs, mut settings) = (None, None, None);
        while let Some(name) = map.next_key::<String>()? {
            match &*name {
                "format" => format = Some(map.next_value()?),
                "step" => step = Some(map.next_value()?),
                "run" => run = map.next_value()?,
                "mesh" => mesh = Some(map.next_value()?),
                "files" => files = Some(map.next_value_seed(Seed(Files, &mut *records))?),
                "tensors" => tensors = Some(map.next_value_seed(Seed(Tensors, &mut *records))?),
                "settings" => settings = Some(map.next_value::<BTreeMap<String, Value>>()?),
                "blobs" => blobs = Some(map.next_value_seed(Seed(Blobs, &mut *records))?),
                "blake3" => drop(map.next_value::<IgnoredAny>()?),
                name => return Err(A::Error::unknown_field(name, MEMBERS)),
            }
        }
        let missing = A::Error::missing_field;
        let catalog = Catalog {
            format: format.ok_or_else(|| missing("format"))?,
            step: step.ok_or_else(|| missing("step"))?,
            run,
            mesh: mesh.ok_or_else(|| missing("mesh"))?,
            settings: Arc::new(settings.ok_or_else(|| missing("settings"))?),
            tensors: tensors.ok_or_else(|| missing("tensors"))?,
            ..Catalog::default()
        };
        files
            .and(blobs)
            .map(|()| catalog)
            .ok_or_else(|| missing(if files.is_none() { "files" } else { "blobs" }))
    }
);

kind!(
    Files,
    Records,
    (),
    deserialize_seq,
    "an array of files",
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(file) = seq.next_element::<FileEntry>()? {
            self.1.add_file(&file);
        }
        Ok(())
    }
);

kind!(
    Blobs,
    Records,
    (),
    deserialize_map,
    "an object of blobs",
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some((name, stored)) = map.next_entry::<String, Stored>()? {
            self.1.add_blob(&name, &stored);
        }
        Ok(())
    }
);

kind!(
    Tensors,
    Records,
    Vec<u32>,
    deserialize_map,
    "an object of tensors",
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<u32>, A::Error> {
        let mut starts = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            let fill = |out: &mut Vec<u8>| map.next_value_seed(Seed(Tensor(&name), out));
            starts.push(self.1.add_tensor(&name, fill)?);
        }
        Ok(starts)
    }
);

kind!(
    Tensor<'_>,
    Vec<u8>,
    (Vec<u64>, u64),
    deserialize_map,
    "a tensor",
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(Vec<u64>, u64), A::Error> {
        let Seed(Tensor(tensor), out) = self;
        let (mut shape, mut t, mut slots) = (None, None, None);
        while let Some(name) = map.next_key::<String>()? {
            match &*name {
                "shape" => shape = Some(map.next_value::<Dims>()?),
                "t" => t = Some(map.next_value()?),
                "slots" => slots = Some(map.next_value_seed(Seed(Slots, &mut *out))?),
                name => return Err(A::Error::unknown_field(name, &["shape", "t", "slots"])),
            }
        }
        let Dims { dims, found } = shape.ok_or_else(|| A::Error::missing_field("shape"))?;
        if found > MOST_DIMS {
            let (short, why) = (tensor.get(..200).unwrap_or(tensor), too_many(found));
            return Err(A::Error::custom(format_args!("invalid shape of tensor {short:?}: {why}")));
        }
        slots.ok_or_else(|| A::Error::missing_field("slots"))?;
        Ok((dims, t.ok_or_else(|| A::Error::missing_field("t"))?))
    }
);

kind!(
    Slots,
    Vec<u8>,
    (),
    deserialize_map,
    "an object of slots",
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            put_slot(self.1, &name, |out| map.next_value_seed(Seed(SlotSeed, out)))?;
        }
        Ok(())
    }
);

kind!(
    SlotSeed,
    Vec<u8>,
    (Type, u64),
    deserialize_map,
    "a slot",
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(Type, u64), A::Error> {
        let (mut dtype, mut pieces) = (None, None);
        while let Some(name) = map.next_key::<String>()? {
            match &*name {
                "dtype" => dtype = Some(map.next_value()?),
                "pieces" => pieces = Some(map.next_value_seed(Seed(Pieces, &mut *self.1))?),
                name => return Err(A::Error::unknown_field(name, &["dtype", "pieces"])),
            }
        }
        let dtype = dtype.ok_or_else(|| A::Error::missing_field("dtype"))?;
        Ok((dtype, pieces.ok_or_else(|| A::Error::missing_field("pieces"))?))
    }
);

kind!(
    Pieces,
    Vec<u8>,
    u64,
    deserialize_seq,
    "an array of pieces",
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<u64, A::Error> {
        let mut count = 0;
        while let Some(piece) = seq.next_element::<PieceEntry>()? {
            put_piece(self.1, &piece);
            count += 1;
        }
        Ok(count)
    }
);
