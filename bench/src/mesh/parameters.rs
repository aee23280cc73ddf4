//! The parameters of the network: names, shapes, first values, and where each lies on a mesh.

use anyhow::Result;
use meshstep_parallel3d::candle::{ColumnLinear, RowLinear, VocabEmbedding};
use meshstep_parallel3d::{Gradient, Model, Placement};
use meshstep_tensor::DType;

use crate::gpt::{Config, Param, VOCAB};

/// In the order forward needs them; a matrix is `[out, in]`. Deviations are GPT-2's: 0.02, and for what is added to the residual
/// stream 0.02 / sqrt(2 layers).
pub(super) fn of(sizes: &Config) -> Result<(Vec<Param>, Model)> {
    let Config { layers, width, context, .. } = *sizes;
    // What works on the residual stream itself, of which each rank along tp has a part of the sequence.
    let stream = Placement::whole().gradient(Gradient::PartialSum);
    let small = |name: &str, shape: &[usize]| Param::normal(name, shape, 0.02);
    let norm = |name: &str| (Param::constant(name, &[width], 1.0), stream.clone());
    let mut all = vec![
        (small("wte", &[VOCAB, width]), VocabEmbedding::placement()),
        (small("wpe", &[context, width]), stream.clone()),
    ];
    for layer in 0..layers {
        let added = 0.02 / (2.0 * layers as f64).sqrt();
        let name = |name: &str| format!("h.{layer}.{name}");
        let up = |own: &str, shape: &[usize]| small(&name(own), shape);
        let down = |own: &str, shape: &[usize]| Param::normal(name(own), shape, added);
        all.extend([
            norm(&name("ln_1")),
            (up("attn.qkv", &[3 * width, width]), ColumnLinear::stacked([width; 3])),
            (down("attn.proj", &[width, width]), RowLinear::placement()),
            norm(&name("ln_2")),
            (up("mlp.fc", &[4 * width, width]), ColumnLinear::placement()),
            (down("mlp.proj", &[width, 4 * width]), RowLinear::placement()),
        ]);
    }
    all.extend([norm("ln_f"), (small("lm_head", &[VOCAB, width]), ColumnLinear::placement())]);
    let add = |model: meshstep_parallel3d::ModelBuilder, (param, placement): &(Param, Placement)| {
        model.param(&param.name, &param.shape, DType::F32, placement.clone())
    };
    let model = all.iter().fold(Model::builder(), add).build()?;
    Ok((all.into_iter().map(|(param, _)| param).collect(), model))
}
