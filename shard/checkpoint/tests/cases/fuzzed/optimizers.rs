//! Bytes that an optimizer reads: a file with PyTorch's names, and the output of `serialize`.

use crate::Memory;
use meshstep_checkpoint as checkpoint;
use meshstep_checkpoint::pytorch::{Import, PyTorchFile};
use meshstep_comm::Communicator;
use meshstep_comm::loopback::{Config, world};
use meshstep_optim::schedule::{Cosine, Schedule};
use meshstep_optim::{AdamW, DynamicLossScale, LossScale};
use meshstep_shard::{Error, Optimizer, Options, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Param, Slice, SliceMut};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// Prefix of the header that `serialize` writes.
const MAGIC: &[u8; 8] = b"MESHSTEP";

thread_local! {
    /// One communicator for all inputs: each communicator has a thread, and a leak checker reports threads that are about to end.
    static COMM: Arc<dyn Communicator> = world(Config::new(1)).unwrap().remove(0);
}

/// Builds an optimizer on one rank: a matrix, an empty parameter, and a frozen one.
pub fn optimizer() -> Optimizer {
    let comm = COMM.with(Arc::clone);
    let layout = Layout::builder().param("w", &[2, 3], DType::F32).param("none", &[0], DType::F32);
    let layout = layout.frozen("still", &[2], DType::BF16).build().unwrap();
    let first = |param: &Param, mut values: SliceMut<'_>| match param.dtype() {
        DType::F32 => values.copy_from(Slice::from(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0][..param.len()])),
        _ => Ok(()),
    };
    let scale = DynamicLossScale { init_scale: 4.0, ..DynamicLossScale::default() };
    let options = Options {
        stage: Stage::Zero1,
        loss_scale: Some(LossScale::Dynamic(scale)),
        schedule: Some(Schedule::new(0.1, Cosine::new(10, 100)).unwrap()),
        ..Options::default()
    };
    Optimizer::new(comm, layout, AdamW::default(), first, options).unwrap()
}

/// Takes a step with gradients of ones.
pub fn step(opt: &mut Optimizer) -> Result<(), Error> {
    let mb = opt.micro_batch(1)?;
    mb.grad("w", &[mb.loss_scale() as f32; 6][..])?;
    mb.grad("none", &[] as &[f32])?;
    mb.finish()?;
    let at: StepArgs = opt.scheduled()?;
    opt.step(at)?.outcome().map(drop)
}

/// Returns the parts of `serialize`'s output: its header without the timestamp, and its data.
pub fn parts(opt: &mut Optimizer) -> (Value, Vec<u8>) {
    let bytes = checkpoint::serialize(opt).unwrap();
    let (header, data) = split(&bytes).unwrap();
    (header, data.to_vec())
}

fn split(bytes: &[u8]) -> Option<(Value, &[u8])> {
    let rest = bytes.get(..bytes.len().checked_sub(32)?)?.strip_prefix(MAGIC)?;
    let (len, rest) = rest.split_first_chunk()?;
    let (header, data) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    let mut header: Value = serde_json::from_slice(header).ok()?;
    header["moment"] = json!(0);
    Some((header, data))
}

/// Puts a header's length in front of it; the first two bytes give it, and the data follows.
fn with_len(input: &[u8]) -> Vec<u8> {
    let Some((&[low, high], rest)) = input.split_first_chunk() else { return Vec::new() };
    let len = usize::from(u16::from_le_bytes([low, high])).min(rest.len());
    [&(len as u64).to_le_bytes()[..], rest].concat()
}

/// Imports a file with PyTorch's names. The first byte selects corrected header lengths, and import options.
pub fn pytorch(input: &[u8]) {
    let Some((&flags, rest)) = input.split_first() else { return };
    let file = if flags & 1 == 0 { rest.to_vec() } else { with_len(rest) };
    let mut opt = optimizer();
    step(&mut opt).unwrap();
    let before = parts(&mut opt);
    let mut disk = Memory::default();
    disk.0.insert("/run/file".into(), file.as_slice().into());
    let from = PyTorchFile::on(Arc::new(disk), Path::new("/run/file"));
    let imported =
        checkpoint::import_pytorch(&mut opt, &from, Import { fresh: flags & 2 != 0, ..Import::default() });
    let after = parts(&mut opt);
    if imported.is_err() {
        assert_eq!(after, before, "a refusal has changed something");
    } else {
        same_as_in_file(&after.0, &after.1, &file);
    }
    // After any import the optimizer still works.
    let _ = step(&mut opt);
}

/// Checks that an optimizer holds the values of the file it was imported from.
fn same_as_in_file(header: &Value, mut data: &[u8], file: &[u8]) {
    let (len, rest) = file.split_first_chunk().unwrap();
    let (text, values) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let keys: Value = serde_json::from_slice(text).unwrap();
    let slots = [("param", ""), ("m", ".exp_avg"), ("v", ".exp_avg_sq")];
    for held in header["vectors"].as_array().unwrap() {
        let (param, slot) = (held["param"].as_str().unwrap(), held["slot"].as_str().unwrap());
        let ends: [usize; 2] = serde_json::from_value(held["range"].clone()).unwrap();
        let size = if held["dtype"] == "BF16" { 2 } else { 4 };
        let (own, others) = data.split_at((ends[1] - ends[0]) * size);
        data = others;
        let (_, suffix) = slots.into_iter().find(|(name, _)| *name == slot).unwrap();
        let key = if suffix.is_empty() { param.to_owned() } else { format!("state.{param}{suffix}") };
        let Some(entry) = keys.get(&key) else {
            assert!(!suffix.is_empty() && own.iter().all(|&byte| byte == 0), "{key:?} is not there");
            continue;
        };
        let [from, to]: [usize; 2] = serde_json::from_value(entry["data_offsets"].clone()).unwrap();
        let given = &values[from..to];
        match (entry["dtype"].as_str().unwrap(), size) {
            ("F32", 4) | ("BF16", 2) => assert_eq!(own, given, "{key:?}"),
            ("BF16", 4) => assert!(own.chunks(4).map(|x| &x[2..]).eq(given.chunks(2)), "{key:?}"),
            // A quiet bit may have been set; finite numbers are equal.
            ("F16", 4) => own.chunks(4).zip(given.chunks(2)).for_each(|(x, y)| {
                let x = f32::from_le_bytes([x[0], x[1], x[2], x[3]]);
                let y = meshstep_tensor::f16::from_le_bytes([y[0], y[1]]).to_f32();
                assert!(x == y || x.is_nan() && y.is_nan(), "{key:?}");
            }),
            (other, _) => panic!("{other} is not taken in"),
        }
    }
}

/// Loads the output of `serialize`. The first byte selects a corrected header length and hash.
pub fn bytes(input: &[u8]) {
    let Some((&flags, rest)) = input.split_first() else { return };
    let bytes = if flags & 1 == 0 { rest.to_vec() } else { framed(&with_len(rest)) };
    let mut opt = optimizer();
    step(&mut opt).unwrap();
    let before = parts(&mut opt);
    let taken = checkpoint::deserialize(&mut opt, &bytes);
    let after = parts(&mut opt);
    if taken.is_err() {
        assert_eq!(after, before, "a refusal has changed something");
    } else {
        let (said, data) = split(&bytes).unwrap();
        assert_eq!(after.1, data);
        for member in ["t", "vectors", "rank", "ranks"] {
            assert_eq!(after.0[member], said[member]);
        }
        let steps = |header: &Value| header["settings"]["steps"].clone();
        assert!(steps(&said).is_null() || steps(&said) == steps(&after.0));
    }
    let _ = step(&mut opt);
}

/// Frames a header with its length, and data, as `serialize` does.
pub fn framed(rest: &[u8]) -> Vec<u8> {
    let body = [MAGIC, rest].concat();
    let hash = blake3::hash(&body);
    [&body[..], hash.as_bytes()].concat()
}
