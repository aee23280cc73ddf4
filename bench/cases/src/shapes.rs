//! Shapes of models, and helpers for steps on them.

use anyhow::Result;
use meshstep_parallel3d::Model;
use meshstep_shard::{MicroBatch, Owners, Stage};
use meshstep_tensor::{DType, Layout, LayoutBuilder};

/// Stages, by their names in the report.
pub const STAGES: [(&str, Stage); 5] = [
    ("unsharded", Stage::Replicated),
    ("stage 1, whole parameters", Stage::WholeParams(Owners::SortedGreedy)),
    ("stage 1", Stage::Zero1),
    ("stage 2", Stage::Zero2),
    ("stage 3 (FSDP)", Stage::Zero3),
];

/// Returns the layout of a model with all parameters on every rank, in the model's units.
pub fn layout(model: &Model) -> Result<Layout> {
    let mut builder = Layout::builder();
    let mut unit = None;
    for param in model.parameters() {
        if param.unit != unit {
            unit.clone_from(&param.unit);
            builder = builder.unit(unit.clone().unwrap_or_default());
        }
        builder = builder.param(param.name.clone(), &param.shape, param.dtype);
    }
    Ok(builder.build()?)
}

/// Returns the layout of `count` f32 parameters of `len` elements, each in its own unit.
pub fn even(count: usize, len: usize) -> Result<Layout> {
    let one = |builder: LayoutBuilder, i: usize| {
        builder.unit(format!("u{i}")).param(format!("p{i}"), &[len], DType::F32)
    };
    Ok((0..count).fold(Layout::builder(), one).build()?)
}

/// Returns the builder of `count` f32 parameters of `len` elements with names as long as a model's, each in its own unit if
/// `units`.
pub fn many(count: usize, len: usize, units: bool) -> LayoutBuilder {
    let one = |builder: LayoutBuilder, i: usize| {
        let builder = if units { builder.unit(format!("model.layers.{i}")) } else { builder };
        builder.param(format!("model.layers.{i}.weight"), &[len], DType::F32)
    };
    (0..count).fold(Layout::builder(), one)
}

/// Writes a gradient into its slot in the communication buffer.
pub fn hand_over(batch: &MicroBatch<'_>, name: &str, write: impl FnOnce(&mut [f32])) -> Result<()> {
    let mut slot = batch.slot(name)?;
    write(slot.as_mut()?.into_typed::<f32>()?);
    Ok(slot.fill()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_parallel3d::models::Gpt2;

    #[test]
    fn a_layout_has_the_model_s_parameters_and_units() {
        let model = Gpt2::SMALL.model(DType::F32).build().unwrap();
        let layout = layout(&model).unwrap();
        let elements: usize = layout.params().iter().map(|param| param.len()).sum();
        assert_eq!(elements as u64, model.len());
        assert_eq!(layout.params()[0].unit(), Some("embeddings"));
        assert!(layout.params().last().unwrap().name() == "ln_f.bias");
    }
}
