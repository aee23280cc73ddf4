//! Well-known models as lists of parameters, with names and shapes as in Hugging Face and placements as in Megatron and torchtitan:
//! layers after a norm are cut by their outputs, layers before the residual stream by their inputs, embeddings by the vocabulary. Each
//! block is a unit.

use crate::{Axis, Gradient, Model, ModelBuilder, Placement};
use meshstep_tensor::DType;

/// Sizes of a GPT-2 (Radford et al., 2019).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpt2 {
    /// Vocabulary entries; pad them if `tp` does not divide them.
    pub vocab: usize,
    /// Maximum sequence length in tokens.
    pub context: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of blocks.
    pub layers: usize,
}

/// Sizes of a Llama 3 (Grattafiori et al., *The Llama 3 herd of models*, 2024).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Llama3 {
    /// Vocabulary entries.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the gated layer.
    pub intermediate: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Width of a token's keys over all heads; its values have the same width.
    pub keys: usize,
}

impl Gpt2 {
    /// 124 million parameters.
    pub const SMALL: Gpt2 = Gpt2 { vocab: 50_257, context: 1024, hidden: 768, layers: 12 };
    /// 355 million.
    pub const MEDIUM: Gpt2 = Gpt2 { hidden: 1024, layers: 24, ..Gpt2::SMALL };
    /// 774 million.
    pub const LARGE: Gpt2 = Gpt2 { hidden: 1280, layers: 36, ..Gpt2::SMALL };
    /// 1.56 billion.
    pub const XL: Gpt2 = Gpt2 { hidden: 1600, layers: 48, ..Gpt2::SMALL };

    /// Returns the parameters under sequence parallelism: norms, output biases and positions act on the residual stream and have a partial
    /// gradient on each rank along `tp`. The output layer is tied to the embedding.
    pub fn model(self, dtype: DType) -> ModelBuilder {
        let Gpt2 { vocab, context, hidden, layers } = self;
        let (columns, rows) = (Placement::whole().cut(Axis::Tp, 1), Placement::whole().cut(Axis::Tp, 0));
        let partial = Placement::whole().gradient(Gradient::PartialSum);
        let qkv = |dim| Placement::whole().cut_in_blocks(Axis::Tp, dim, [hidden; 3]);
        let embeddings = Model::builder().unit("embeddings");
        let mut model = embeddings.param("wte.weight", &[vocab, hidden], dtype, rows.clone()).param(
            "wpe.weight",
            &[context, hidden],
            dtype,
            partial.clone(),
        );
        for layer in 0..layers {
            let own: [(&str, &[usize], Placement); 12] = [
                ("ln_1.weight", &[hidden], partial.clone()),
                ("ln_1.bias", &[hidden], partial.clone()),
                ("attn.c_attn.weight", &[hidden, 3 * hidden], qkv(1)),
                ("attn.c_attn.bias", &[3 * hidden], qkv(0)),
                ("attn.c_proj.weight", &[hidden, hidden], rows.clone()),
                ("attn.c_proj.bias", &[hidden], partial.clone()),
                ("ln_2.weight", &[hidden], partial.clone()),
                ("ln_2.bias", &[hidden], partial.clone()),
                ("mlp.c_fc.weight", &[hidden, 4 * hidden], columns.clone()),
                ("mlp.c_fc.bias", &[4 * hidden], rows.clone()),
                ("mlp.c_proj.weight", &[4 * hidden, hidden], rows.clone()),
                ("mlp.c_proj.bias", &[hidden], partial.clone()),
            ];
            model = add(model, &format!("h.{layer}"), dtype, own);
        }
        model
            .unit("ln_f")
            .param("ln_f.weight", &[hidden], dtype, partial.clone())
            .param("ln_f.bias", &[hidden], dtype, partial)
            .tied("lm_head.weight", "wte.weight", &[vocab, hidden])
    }
}

impl Llama3 {
    /// 8 billion parameters.
    pub const B8: Llama3 =
        Llama3 { vocab: 128_256, hidden: 4096, intermediate: 14_336, layers: 32, keys: 1024 };
    /// 70 billion.
    pub const B70: Llama3 = Llama3 { hidden: 8192, intermediate: 28_672, layers: 80, ..Llama3::B8 };
    /// 405 billion.
    pub const B405: Llama3 = Llama3 { hidden: 16_384, intermediate: 53_248, layers: 126, ..Llama3::B8 };

    /// Returns the parameters in `stages` pipeline stages of about equally many blocks, under sequence parallelism as in [`Gpt2::model`].
    ///
    /// # Panics
    /// If `stages` is 0.
    pub fn model(self, dtype: DType, stages: usize) -> ModelBuilder {
        assert!(stages > 0, "a model has a stage at least");
        let Llama3 { vocab, hidden, intermediate, layers, keys } = self;
        let (outputs, inputs) = (Placement::whole().cut(Axis::Tp, 0), Placement::whole().cut(Axis::Tp, 1));
        let norm = Placement::whole().gradient(Gradient::PartialSum);
        let embeddings = Model::builder().unit("model.embed_tokens");
        let mut model =
            embeddings.param("model.embed_tokens.weight", &[vocab, hidden], dtype, outputs.clone());
        for layer in 0..layers {
            let own: [(&str, &[usize], Placement); 9] = [
                ("input_layernorm.weight", &[hidden], norm.clone()),
                ("self_attn.q_proj.weight", &[hidden, hidden], outputs.clone()),
                ("self_attn.k_proj.weight", &[keys, hidden], outputs.clone()),
                ("self_attn.v_proj.weight", &[keys, hidden], outputs.clone()),
                ("self_attn.o_proj.weight", &[hidden, hidden], inputs.clone()),
                ("post_attention_layernorm.weight", &[hidden], norm.clone()),
                ("mlp.gate_proj.weight", &[intermediate, hidden], outputs.clone()),
                ("mlp.up_proj.weight", &[intermediate, hidden], outputs.clone()),
                ("mlp.down_proj.weight", &[hidden, intermediate], inputs.clone()),
            ];
            model = add(model.stage(layer * stages / layers), &format!("model.layers.{layer}"), dtype, own);
        }
        let last = model.stage(stages - 1).unit("lm_head").param("model.norm.weight", &[hidden], dtype, norm);
        last.param("lm_head.weight", &[vocab, hidden], dtype, outputs)
    }
}

fn add<const N: usize>(
    model: ModelBuilder,
    prefix: &str,
    dtype: DType,
    own: [(&str, &[usize], Placement); N],
) -> ModelBuilder {
    own.into_iter().fold(model.unit(prefix), |model, (name, shape, placement)| {
        model.param(format!("{prefix}.{name}"), shape, dtype, placement)
    })
}
