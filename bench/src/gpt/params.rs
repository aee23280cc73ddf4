//! Parameters of the network: names, shapes and initial values, by segment in forward order.

use super::{Config, VOCAB};
use crate::keyed::Stream;

/// A part of the network with its own graph and parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segment {
    /// Embedding of tokens and positions.
    Embed,
    /// One transformer block.
    Block(usize),
    /// Last norm, output matrix and loss.
    Head,
}

/// Description of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Param {
    /// Name of the parameter, in the style of GPT-2's published weights.
    pub(crate) name: String,
    /// Extents, rows first; a matrix is `[in, out]`.
    pub(crate) shape: Vec<usize>,
    init: Init,
}

/// Initial values of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Init {
    /// All elements have the same value.
    Constant(f32),
    /// Normal with mean 0 and this deviation.
    Normal(f64),
}

impl Param {
    /// Describes a parameter with one initial value.
    pub(crate) fn constant(name: impl Into<String>, shape: &[usize], value: f32) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), init: Init::Constant(value) }
    }

    /// Describes a parameter with normally distributed initial values of mean 0 and this deviation.
    pub(crate) fn normal(name: impl Into<String>, shape: &[usize], deviation: f64) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), init: Init::Normal(deviation) }
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if weight decay applies: to matrices, not to biases and norms.
    pub(crate) fn decays(&self) -> bool {
        self.shape.len() >= 2
    }

    /// Writes the initial values, a function of `seed`, the name and each element's index.
    pub(crate) fn fill(&self, seed: u64, out: &mut [f32]) {
        self.fill_at(seed, 0.., out);
    }

    /// Writes the initial values of some elements, given by their indices.
    pub(crate) fn fill_at(&self, seed: u64, places: impl IntoIterator<Item = usize>, out: &mut [f32]) {
        match self.init {
            Init::Constant(value) => out.fill(value),
            Init::Normal(deviation) => {
                let stream = Stream::named(seed, &self.name);
                for (i, x) in places.into_iter().zip(out) {
                    *x = (deviation * stream.normal(i as u64)) as f32;
                }
            }
        }
    }
}

impl Config {
    /// Returns every parameter in the order in which the forward pass needs it.
    pub(crate) fn params(&self) -> Vec<Param> {
        Segment::all(self).into_iter().flat_map(|segment| segment.params(self)).collect()
    }
}

impl Segment {
    /// Returns every segment in forward order.
    pub(super) fn all(config: &Config) -> Vec<Self> {
        let blocks = (0..config.layers).map(Self::Block);
        std::iter::once(Self::Embed).chain(blocks).chain([Self::Head]).collect()
    }

    /// Returns the common prefix of the segment's parameter names.
    pub(super) fn prefix(self) -> String {
        match self {
            Self::Embed | Self::Head => String::new(),
            Self::Block(layer) => format!("h.{layer}."),
        }
    }

    /// Returns the segment's parameters in the order in which its forward pass needs them.
    ///
    /// Deviations are GPT-2's: 0.02, and 0.02 / sqrt(2 layers) for matrices that write to the residual stream.
    pub(super) fn params(self, config: &Config) -> Vec<Param> {
        let (c, small) = (config.width, Init::Normal(0.02));
        let residual = Init::Normal(0.02 / (2.0 * config.layers as f64).sqrt());
        let (one, zero) = (Init::Constant(1.0), Init::Constant(0.0));
        let table: &[(&str, &[usize], Init)] = match self {
            Self::Embed => &[("wte", &[VOCAB, c], small), ("wpe", &[config.context, c], small)],
            Self::Block(_) => &[
                ("ln_1.weight", &[c], one),
                ("ln_1.bias", &[c], zero),
                ("attn.qkv.weight", &[c, 3 * c], small),
                ("attn.proj.weight", &[c, c], residual),
                ("attn.proj.bias", &[c], zero),
                ("ln_2.weight", &[c], one),
                ("ln_2.bias", &[c], zero),
                ("mlp.fc.weight", &[c, 4 * c], small),
                ("mlp.fc.bias", &[4 * c], zero),
                ("mlp.proj.weight", &[4 * c, c], residual),
                ("mlp.proj.bias", &[c], zero),
            ],
            Self::Head => &[
                ("ln_f.weight", &[c], one),
                ("ln_f.bias", &[c], zero),
                ("lm_head.weight", &[c, VOCAB], small),
            ],
        };
        let named = |&(name, shape, init): &(&str, &[usize], Init)| Param {
            name: self.prefix() + name,
            shape: shape.to_vec(),
            init,
        };
        table.iter().map(named).collect()
    }
}
