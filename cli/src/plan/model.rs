//! Parameters to plan: of a known model, of a safetensors file, or a number of them.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use meshstep_parallel3d::models::{Gpt2, Llama3};
use meshstep_parallel3d::{Axis, Mesh, Model, Placement};
use meshstep_tensor::DType;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

/// Longest header of a safetensors file that is read.
const MAX_HEADER: u64 = 100 << 20;
/// Vectors into which a number of parameters is divided.
const UNITS: u64 = 32;
/// Largest number of parameters, 2^53, up to which a count written as 7e9 is exact.
const MOST: f64 = 9_007_199_254_740_992.0;

/// Where the parameters come from.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Source {
    Gpt2(Gpt2),
    Llama3(Llama3),
    Number(u64),
    File(PathBuf),
}

impl Source {
    /// Parses a name, a number, or the path of a file that exists.
    pub(super) fn parse(text: &str) -> Result<Source, String> {
        let model = match text {
            "gpt2" => Source::Gpt2(Gpt2::SMALL),
            "gpt2-medium" => Source::Gpt2(Gpt2::MEDIUM),
            "gpt2-large" => Source::Gpt2(Gpt2::LARGE),
            "gpt2-xl" => Source::Gpt2(Gpt2::XL),
            "llama3-8b" => Source::Llama3(Llama3::B8),
            "llama3-70b" => Source::Llama3(Llama3::B70),
            "llama3-405b" => Source::Llama3(Llama3::B405),
            _ => match text.parse::<f64>() {
                Ok(number) if (1.0..=MOST).contains(&number) && number.fract() == 0.0 => {
                    Source::Number(number as u64)
                }
                Ok(_) => return Err("a number of parameters is whole, from 1 to 2^53".to_owned()),
                Err(_) if Path::new(text).is_file() => Source::File(text.into()),
                Err(_) => return Err("no model has this name, and there is no such file".to_owned()),
            },
        };
        Ok(model)
    }

    /// Returns true if the parameters have types of their own.
    pub(super) fn has_types(&self) -> bool {
        matches!(self, Source::File(_))
    }

    /// Returns the model with parameters of `dtype`, in the pipeline stages of `mesh`. Without one, parameters have the types of the
    /// file, or bf16, in which most models are trained.
    pub(super) fn model(&self, dtype: Option<DType>, mesh: &Mesh) -> Result<Model> {
        let stages = mesh.degree(Axis::Pp);
        if let (Source::Number(_) | Source::File(_), true) = (self, mesh.degree(Axis::Tp) > 1) {
            bail!(
                "only the models known by name are divided along tp: how tensors of a file are cut is not known"
            );
        }
        let own = dtype.unwrap_or(DType::BF16);
        let builder = match self {
            Source::Llama3(llama) => llama.model(own, stages),
            _ if stages > 1 => bail!("only the llama3 models are planned in pipeline stages; leave out pp"),
            Source::Gpt2(gpt) => gpt.model(own),
            Source::Number(number) => {
                let units = UNITS.min(*number);
                let mut builder = Model::builder();
                for i in 0..units {
                    let len = usize::try_from(number / units + u64::from(i < number % units))?;
                    builder = builder.unit(format!("unit{i}")).param(
                        format!("unit{i}.w"),
                        &[len],
                        own,
                        Placement::whole(),
                    );
                }
                builder
            }
            Source::File(path) => {
                let header = header(path).with_context(|| format!("{}", path.display()))?;
                let mut tensors: Vec<_> = header.tensors().into_iter().collect();
                // The order of the bytes is usually that of the forward pass.
                tensors.sort_by_key(|(_, info)| info.data_offsets);
                let mut builder = Model::builder();
                for (name, info) in tensors {
                    let dtype = match (dtype, known(info.dtype, &name)) {
                        (Some(_), Err(_)) => continue,
                        (given, stored) => given.map_or(stored, Ok)?,
                    };
                    builder = builder.unit(unit(&name)).param(name, &info.shape, dtype, Placement::whole());
                }
                builder
            }
        };
        Ok(builder.build()?)
    }
}

fn header(path: &Path) -> Result<Metadata> {
    let mut file = File::open(path)?;
    let mut len = [0; 8];
    file.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    ensure!(len <= MAX_HEADER, "its header would have {len} bytes; is it a safetensors file?");
    let mut text = Vec::new();
    file.take(len).read_to_end(&mut text)?;
    ensure!(text.len() as u64 == len, "the file ends within its header");
    Ok(serde_json::from_slice(&text)?)
}

fn known(dtype: Dtype, name: &str) -> Result<DType> {
    Ok(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::BF16 => DType::BF16,
        Dtype::F16 => DType::F16,
        other => {
            bail!("{name} has the type {other:?}, which is not trained; --dtype leaves such tensors out")
        }
    })
}

/// Returns the block of a parameter: its name up to the first number, `model.layers.3`, or else its whole name.
fn unit(name: &str) -> String {
    let mut parts = name.split('.');
    let mut block = String::new();
    for part in &mut parts {
        block += part;
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return block;
        }
        block += ".";
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_end_at_the_first_number() {
        for (name, block) in [
            ("model.layers.3.mlp.weight", "model.layers.3"),
            ("h.11.attn.0.weight", "h.11"),
            ("wte.weight", "wte.weight"),
            ("0.weight", "0"),
            ("a..b", "a..b"),
        ] {
            assert_eq!(unit(name), block);
        }
    }

    #[test]
    fn a_number_is_divided_into_units() {
        let alone: Mesh = "dp=1".parse().unwrap();
        let model = |text: &str| Source::parse(text).unwrap().model(None, &alone).unwrap();
        assert_eq!((model("7e9").len(), model("7e9").parameters().len()), (7_000_000_000, 32));
        assert_eq!((model("33").len(), model("33").parameters()[0].shape[0]), (33, 2));
        assert_eq!((model("5").len(), model("5").parameters().len()), (5, 5));
        for wrong in ["0", "1.5", "-1", "nan", "inf", "1e30", "no-such-model"] {
            assert!(Source::parse(wrong).is_err(), "{wrong}");
        }
    }
}
