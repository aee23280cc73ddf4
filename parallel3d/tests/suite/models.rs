//! Well-known models have the published parameter counts and divide as expected.

use meshstep_parallel3d::models::{Gpt2, Llama3};
use meshstep_parallel3d::{Axis, Mesh, MeshError, Model};
use meshstep_tensor::DType::{BF16, F32};

/// Parameter counts of the published checkpoints.
#[test]
fn sizes_are_the_published_ones() {
    let gpt2 = |config: Gpt2| config.model(F32).build().unwrap().len();
    let sizes = [Gpt2::SMALL, Gpt2::MEDIUM, Gpt2::LARGE, Gpt2::XL].map(gpt2);
    assert_eq!(sizes, [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]);
    let llama = |config: Llama3| config.model(BF16, 1).build().unwrap().len();
    let sizes = [Llama3::B8, Llama3::B70, Llama3::B405].map(llama);
    assert_eq!(sizes, [8_030_261_248, 70_553_706_496, 405_853_388_800]);
}

/// Over the ranks along tp and pp, cut parameters add up to the model and whole parameters count once.
#[test]
fn ranks_hold_the_model_once() {
    let models: [(Model, &str); 3] = [
        (Gpt2 { vocab: 50_304, ..Gpt2::SMALL }.model(F32).build().unwrap(), "tp=4,dp=2"),
        (Llama3::B8.model(BF16, 1).build().unwrap(), "tp=8,cp=2,dp=2"),
        (Llama3::B405.model(BF16, 16).build().unwrap(), "tp=8,dp=128,pp=16"),
    ];
    for (model, mesh) in models {
        let mesh: Mesh = mesh.parse().unwrap();
        let mut counted = 0;
        for rank in mesh.group(0, Axis::Tp | Axis::Pp).unwrap().ranks() {
            let coordinate = mesh.coordinate(rank).unwrap();
            for family in model.families(&mesh, &coordinate).unwrap() {
                if coordinate.is_first(family.sharing.repeated()) {
                    counted += family.layout.params().iter().map(|p| p.len() as u64).sum::<u64>();
                }
            }
        }
        assert_eq!(counted, model.len(), "{mesh}");
    }
}

/// A vocabulary that does not divide is an error with the extent to pad.
#[test]
fn an_odd_vocabulary_is_refused() {
    let mesh: Mesh = "tp=2".parse().unwrap();
    let model = Gpt2::SMALL.model(F32).build().unwrap();
    let error = model.families(&mesh, &mesh.coordinate(0).unwrap()).unwrap_err();
    let name = "wte.weight".to_owned();
    assert_eq!(error, MeshError::Uneven { name, axis: Axis::Tp, degree: 2, dim: 0, extent: 50_257 });
}
