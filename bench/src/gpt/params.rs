//! The network's parameters: names, shapes and first values, segment by segment in the order forward needs them.

use super::{Config, VOCAB};
use crate::keyed::Stream;

/// A part of the network with a graph and parameters of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segment {
    /// Tokens and positions become vectors.
    Embed,
    /// One transformer block.
    Block(usize),
    /// The last norm, the output matrix and the loss.
    Head,
}

/// One parameter, before it has values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Param {
    /// Its name, in the manner of GPT-2's published weights.
    pub(crate) name: String,
    /// Its lengths, rows first; a matrix is `[in, out]`.
    pub(crate) shape: Vec<usize>,
    init: Init,
}

/// Where a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Init {
    /// All elements the same.
    Constant(f32),
    /// Normal with mean 0 and this deviation.
    Normal(f64),
}

impl Param {
    /// A parameter that starts at one value.
    pub(crate) fn constant(name: impl Into<String>, shape: &[usize], value: f32) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), init: Init::Constant(value) }
    }

    /// A parameter that starts normally distributed, with mean 0 and this deviation.
    pub(crate) fn normal(name: impl Into<String>, shape: &[usize], deviation: f64) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), init: Init::Normal(deviation) }
    }

    /// How many numbers it has.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether weight decay is for it: for matrices, not for biases and norms.
    pub(crate) fn decays(&self) -> bool {
        self.shape.len() >= 2
    }

    /// Writes its first values, a function of `seed`, its name and each element's place.
    pub(crate) fn fill(&self, seed: u64, out: &mut [f32]) {
        self.fill_at(seed, 0.., out);
    }

    /// Writes the first values of some elements, given their places.
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
    /// Every parameter, in the order the forward pass needs them.
    pub(crate) fn params(&self) -> Vec<Param> {
        Segment::all(self).into_iter().flat_map(|segment| segment.params(self)).collect()
    }
}

impl Segment {
    /// Every segment, in forward order.
    pub(super) fn all(config: &Config) -> Vec<Self> {
        let blocks = (0..config.layers).map(Self::Block);
        std::iter::once(Self::Embed).chain(blocks).chain([Self::Head]).collect()
    }

    /// What the names of its parameters begin with.
    pub(super) fn prefix(self) -> String {
        match self {
            Self::Embed | Self::Head => String::new(),
            Self::Block(layer) => format!("h.{layer}."),
        }
    }

    /// Its parameters, in the order its forward pass needs them.
    ///
    /// Deviations are GPT-2's: 0.02, and for what is added to the residual stream 0.02 / sqrt(2 layers).
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
