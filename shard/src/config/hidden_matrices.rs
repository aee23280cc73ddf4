//! Default choice of the parameters for a rule that sees whole matrices.

use meshstep_tensor::Param;

/// Returns true for the matrices of hidden layers, by shape and name: for [`Muon`](meshstep_optim::Muon) in
/// [`Groups::with`](crate::Groups::with).
///
/// These are parameters of two or more dimensions, except those with one of these words in their names, in upper or lower case. Dots and
/// slashes separate the parts of a name.
///
/// | excluded | part of the name |
/// |---|---|
/// | embeddings | `wte`, `wpe`, `emb`, or containing `embed` |
/// | heads | `head`, `classifier`, or ending with `_head` such as `lm_head`; `output` as the first part, as in `output.weight` |
/// | norms | `ln`, beginning with `ln_`, or containing `norm` |
/// | biases | `b`, or containing `bias` |
///
/// Muon updates matrices of two dimensions, and of three with [`Blocks::Batch`](meshstep_optim::Blocks::Batch); it refuses others by
/// name. For a model with other names write a predicate of your own:
///
/// ```
/// use meshstep_optim::{AdamW, Muon};
/// use meshstep_shard::{Groups, hidden_matrices};
/// use meshstep_tensor::Param;
///
/// let rules = Groups::new(AdamW::default())
///     .with(Muon::default(), |p: &Param| hidden_matrices(p) && !p.name().starts_with("router."));
/// # let _ = rules;
/// ```
pub fn hidden_matrices(param: &Param) -> bool {
    let name = param.name().to_ascii_lowercase();
    let excluded = name.split(['.', '/']).any(is_excluded) || name.split(['.', '/']).next() == Some("output");
    param.shape().len() >= 2 && !excluded
}

/// Returns true if this part of a name marks an embedding, a head, a norm or a bias.
fn is_excluded(part: &str) -> bool {
    let is_embedding = matches!(part, "wte" | "wpe" | "emb") || part.contains("embed");
    let is_head = matches!(part, "head" | "classifier") || part.ends_with("_head");
    let is_norm = part == "ln" || part.starts_with("ln_") || part.contains("norm");
    let is_bias = part == "b" || part.contains("bias");
    is_embedding || is_head || is_norm || is_bias
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_tensor::{DType, Layout};

    fn selected(name: &str, shape: &[usize]) -> bool {
        let layout = Layout::builder().param(name, shape, DType::F32).build().unwrap();
        hidden_matrices(&layout.params()[0])
    }

    #[test]
    fn matrices_of_hidden_layers_are_selected() {
        for name in [
            "w",
            "h.0.attn.c_attn.weight",
            "transformer.h.11.mlp.c_proj.weight",
            "model.layers.3.self_attn.q_proj.weight",
            "layers/0/feed_forward/w2",
            "encoder.layer.1.attention.output.dense.weight",
            "blocks.2.multihead.wv.weight",
        ] {
            assert!(selected(name, &[4, 8]), "{name}");
            assert!(!selected(name, &[8]), "{name}");
        }
        assert!(selected("experts.up", &[3, 4, 8]));
    }

    #[test]
    fn embeddings_heads_norms_and_biases_are_not() {
        for name in [
            "transformer.wte.weight",
            "wpe",
            "emb.weight",
            "model.embed_tokens.weight",
            "tok_embeddings.weight",
            "Embedding.weight",
            "lm_head.weight",
            "head.weight",
            "value_head/w",
            "classifier.dense.weight",
            "output.weight",
            "h.0.ln_1.weight",
            "ln.weight",
            "layers.0.q_norm.weight",
            "LayerNorm.weight",
            "experts.b",
            "experts.up_bias",
        ] {
            assert!(!selected(name, &[4, 8]), "{name}");
        }
    }
}
