//! Parameters of the network: names, shapes, initial values, and placements on a mesh.

use anyhow::Result;
use meshstep_candle::parallel::{ColumnLinear, RowLinear, VocabEmbedding};
use meshstep_parallel3d::{Gradient, Model, Placement};
use meshstep_tensor::DType;

use crate::gpt::{Config, Param, VOCAB};

/// Unit of the network that is computed together, and gathered if parameters are sharded.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) name: String,
    /// Parameters in forward order.
    pub(super) params: Vec<Param>,
}

type Placed = (Param, Placement);

/// Returns the units and the model, in forward order; a matrix is `[out, in]`. Deviations are GPT-2's: 0.02, and 0.02 /
/// sqrt(2 layers) for matrices that write to the residual stream.
pub(super) fn of(sizes: &Config) -> Result<(Vec<Unit>, Model)> {
    let (mut units, mut model) = (Vec::new(), Model::builder());
    for (name, params) in placed(sizes) {
        model = model.unit(&name);
        for (param, placement) in &params {
            model = model.param(&param.name, &param.shape, DType::F32, placement.clone());
        }
        units.push(Unit { name, params: params.into_iter().map(|(param, _)| param).collect() });
    }
    Ok((units, model.build()?))
}

fn placed(sizes: &Config) -> Vec<(String, Vec<Placed>)> {
    let Config { width, context, .. } = *sizes;
    let embed = vec![
        (Param::normal("wte", &[VOCAB, width], 0.02), VocabEmbedding::placement()),
        (Param::normal("wpe", &[context, width], 0.02), on_stream()),
    ];
    let lm_head = Param::normal("lm_head", &[VOCAB, width], 0.02);
    let head = vec![norm("ln_f", width), (lm_head, ColumnLinear::placement())];
    let blocks = (0..sizes.layers).map(|layer| (format!("h.{layer}"), block(sizes, layer)));
    let embed = std::iter::once(("embed".to_owned(), embed));
    embed.chain(blocks).chain([("head".to_owned(), head)]).collect()
}

fn block(sizes: &Config, layer: usize) -> Vec<Placed> {
    let (c, added) = (sizes.width, 0.02 / (2.0 * sizes.layers as f64).sqrt());
    let name = |name: &str| format!("h.{layer}.{name}");
    vec![
        norm(&name("ln_1"), c),
        (Param::normal(name("attn.qkv"), &[3 * c, c], 0.02), ColumnLinear::stacked([c; 3])),
        (Param::normal(name("attn.proj"), &[c, c], added), RowLinear::placement()),
        norm(&name("ln_2"), c),
        (Param::normal(name("mlp.fc"), &[4 * c, c], 0.02), ColumnLinear::placement()),
        (Param::normal(name("mlp.proj"), &[c, 4 * c], added), RowLinear::placement()),
    ]
}

fn norm(name: &str, width: usize) -> Placed {
    (Param::constant(name, &[width], 1.0), on_stream())
}

/// Returns the placement of parameters that act on the residual stream, of which each rank along tp has a part of the
/// sequence.
fn on_stream() -> Placement {
    Placement::whole().gradient(Gradient::PartialSum)
}
