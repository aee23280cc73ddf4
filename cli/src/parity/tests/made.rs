//! Traces that tests generate, with results of plain f64 loops.

use std::collections::{BTreeMap, HashMap};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

/// A trace before it is encoded.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub(crate) spec: Value,
    pub(crate) metadata: HashMap<String, String>,
    pub(crate) tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<f64>)>,
}

impl Made {
    /// Creates a trace without steps, which a test fills.
    pub(crate) fn new(optimizer: Value) -> Made {
        let metadata = [("format", "meshstep-trace"), ("version", "1")];
        Made {
            spec: json!({"optimizer": optimizer, "steps": 0, "tolerance": {"rtol": 1e-5, "atol": 1e-7}}),
            metadata: metadata.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect(),
            tensors: BTreeMap::new(),
        }
    }

    /// Creates `steps` steps of `rule(t, g, p, state)` on two parameters; gradients are a fixed function of step and index.
    pub(crate) fn elementwise(
        optimizer: Value,
        dtype: Dtype,
        slots: &[&str],
        rule: impl Fn(f64, f64, &mut f64, &mut [f64; 3]),
    ) -> Made {
        let mut made = Made::new(optimizer);
        made.spec["steps"] = json!(STEPS);
        for (name, shape) in [("w", vec![3, 5]), ("bias", vec![7])] {
            let len = shape.iter().product();
            let mut p: Vec<f64> = (0..len).map(|i| round(dtype, wave(0, i, name))).collect();
            let mut state = vec![[0.0; 3]; len];
            made.put(&format!("param/{name}"), dtype, &shape, &p);
            for t in 1..=STEPS {
                let g: Vec<f64> = (0..len).map(|i| round(dtype, wave(t, i, name))).collect();
                for i in 0..len {
                    rule(t as f64, g[i], &mut p[i], &mut state[i]);
                }
                made.put(&format!("grad/{t}/{name}"), dtype, &shape, &g);
                made.put(&format!("expect/{t}/{name}"), dtype, &shape, &p);
            }
            for (s, slot) in slots.iter().enumerate() {
                let values: Vec<f64> = state.iter().map(|state| state[s]).collect();
                made.put(&format!("expect_state/{STEPS}/{name}/{slot}"), dtype, &shape, &values);
            }
        }
        made
    }

    /// Creates a trace of AdamW with learning rate 0.01 and weight decay 0.1.
    pub(crate) fn adamw(dtype: Dtype) -> Made {
        let optimizer = json!({"name": "adamw", "lr": 0.01, "weight_decay": 0.1});
        Made::elementwise(optimizer, dtype, &["m", "v"], |t, g, p, [m, v, _]| {
            *m = 0.9 * *m + 0.1 * g;
            *v = 0.999 * *v + 0.001 * g * g;
            let (m, v) = (*m / (1.0 - 0.9f64.powf(t)), *v / (1.0 - 0.999f64.powf(t)));
            *p -= 0.01 * (m / (v.sqrt() + 1e-8) + 0.1 * *p);
        })
    }

    pub(crate) fn put(&mut self, name: &str, dtype: Dtype, shape: &[usize], values: &[f64]) {
        self.tensors.insert(name.to_owned(), (dtype, shape.to_vec(), values.to_vec()));
    }

    /// Encodes the file.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let data: Vec<Vec<u8>> =
            self.tensors.values().map(|(dtype, _, values)| encode(*dtype, values)).collect();
        let mut metadata = self.metadata.clone();
        metadata.entry("spec".to_owned()).or_insert(self.spec.to_string());
        let views =
            self.tensors.iter().zip(&data).map(|((name, tensor), data)| {
                (name, TensorView::new(tensor.0, tensor.1.clone(), data).unwrap())
            });
        safetensors::serialize(views, Some(metadata)).unwrap()
    }
}

/// Number of steps of generated traces.
pub(crate) const STEPS: usize = 6;

/// Returns a value between -1 and 1 that is not close to 0.
fn wave(t: usize, i: usize, name: &str) -> f64 {
    let x = (t * 37 + i * 11 + name.len() * 5) as f64;
    let y = (x * 0.7311).sin();
    y + 0.05f64.copysign(y)
}

fn round(dtype: Dtype, x: f64) -> f64 {
    if dtype == Dtype::F32 { (x as f32).into() } else { x }
}

fn encode(dtype: Dtype, values: &[f64]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
        Dtype::F64 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::BF16 => {
            values.iter().flat_map(|&x| meshstep_tensor::bf16::from_f64(x).to_le_bytes()).collect()
        }
        Dtype::I64 => values.iter().flat_map(|&x| (x as i64).to_le_bytes()).collect(),
        other => panic!("no test writes {other:?}"),
    }
}
