//! Compares the network with slower or simpler computations of the same values.

use std::collections::HashMap;

use meshstep_cases::long;

use super::*;
use crate::keyed::Stream;

const CONFIG: Config = Config { layers: 2, heads: 2, width: 12, context: 8 };

/// Returns the trained network's size in long runs, else a smaller one.
fn large() -> Config {
    if long() { Config::default() } else { Config { layers: 2, heads: 4, width: 48, context: 32 } }
}

/// Creates a network with initial values plus noise, so that no gradient is special.
fn gpt(config: Config, rows: usize) -> Gpt {
    let gpt = Gpt::new(config, rows).unwrap();
    for param in config.params() {
        let mut values = vec![0.0; param.len()];
        param.fill(1, &mut values);
        let noise = Stream::named(2, &param.name);
        for (i, x) in (0..).zip(&mut values) {
            *x += (0.1 * noise.normal(i)) as f32;
        }
        gpt.weights().set(&param.name, &values).unwrap();
    }
    gpt
}

fn batch(config: Config, rows: usize, seed: u64) -> Batch {
    let (stream, len) = (Stream::new(seed, &[]), rows * config.context);
    let bytes = |from: u64| (0..len as u64).map(|i| stream.below(from + i, 256) as u8).collect();
    Batch { rows, inputs: bytes(0), targets: bytes(1 << 32) }
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the loss and the gradients with their names, in the order in which they were handed over.
fn cut(gpt: &Gpt, batch: &Batch) -> (f32, Vec<(String, Vec<f32>)>) {
    let mut grads = Vec::new();
    let on_grad = |name: &str, grad: &Tensor| {
        grads.push((name.to_owned(), numbers(grad)));
        Ok(())
    };
    let loss = gpt.loss_and_grads(batch, on_grad).unwrap();
    (loss, grads)
}

/// Returns the same from one graph of the whole network.
fn whole(gpt: &Gpt, batch: &Batch) -> (f32, HashMap<String, Vec<f32>>) {
    let (scope, tokens) = (gpt.scope(), gpt.tokens(batch).unwrap());
    let mut x = None;
    for segment in Segment::all(&gpt.config) {
        x = Some(scope.forward(segment, x.as_ref(), &tokens).unwrap());
    }
    let loss = x.unwrap();
    let grads = loss.backward().unwrap();
    let grad = |param: Param| {
        let grad = grads.get(gpt.weights().get(&param.name).unwrap()).unwrap();
        (param.name, numbers(grad))
    };
    (loss.to_scalar().unwrap(), gpt.config.params().into_iter().map(grad).collect())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn gradients_of_the_cut_graph_equal_those_of_the_whole_one_bit_for_bit() {
    for (config, rows) in [(CONFIG, 3), (Config { layers: 1, heads: 3, ..CONFIG }, 1), (large(), 2)] {
        let (gpt, batch) = (gpt(config, rows), batch(config, rows, 4));
        let ((loss, cut), (whole_loss, whole)) = (cut(&gpt, &batch), whole(&gpt, &batch));
        assert_eq!(loss.to_bits(), whole_loss.to_bits());
        assert_eq!(cut.len(), whole.len());
        for (name, grad) in &cut {
            assert!(bits(grad) == bits(&whole[name]), "{name} of {config:?}");
        }
    }
}

#[test]
fn every_parameter_gets_a_gradient_of_its_shape_that_is_not_zero() {
    let (_, grads) = cut(&gpt(CONFIG, 2), &batch(CONFIG, 2, 5));
    let lens: HashMap<String, usize> =
        CONFIG.params().into_iter().map(|p| (p.name.clone(), p.len())).collect();
    assert_eq!(grads.len(), lens.len());
    for (name, grad) in grads {
        assert_eq!(grad.len(), lens[&name], "{name}");
        let largest = grad.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        assert!(largest > 1e-6 && largest.is_finite(), "{name}: largest element {largest}");
    }
}

#[test]
fn gradients_leave_in_the_reverse_of_the_order_parameters_are_listed_in() {
    let (_, grads) = cut(&gpt(CONFIG, 1), &batch(CONFIG, 1, 6));
    let mut listed: Vec<String> = CONFIG.params().into_iter().map(|param| param.name).collect();
    listed.reverse();
    assert_eq!(grads.into_iter().map(|(name, _)| name).collect::<Vec<_>>(), listed);
}

#[test]
fn gradients_predict_how_the_loss_moves() {
    let (gpt, batch) = (gpt(CONFIG, 4), batch(CONFIG, 4, 7));
    let (_, grads) = cut(&gpt, &batch);
    for (name, grad) in grads {
        let values = numbers(gpt.weights().get(&name).unwrap());
        let norm = grad.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let at = |step: f64| {
            let moved = values.iter().zip(&grad).map(|(x, g)| x + (step * f64::from(*g) / norm) as f32);
            gpt.weights().set(&name, &moved.collect::<Vec<_>>()).unwrap();
            f64::from(gpt.loss(&batch).unwrap())
        };
        let slope = (at(2e-2) - at(-2e-2)) / 4e-2;
        gpt.weights().set(&name, &values).unwrap();
        assert!((slope - norm).abs() < 0.05 * norm + 1e-4, "{name}: slope {slope}, gradient {norm}");
    }
}

#[test]
fn no_token_sees_the_future() {
    let gpt = gpt(CONFIG, 1);
    let batch = batch(CONFIG, 1, 8);
    // Changing one target changes the mean loss by this position's loss only.
    let effect = |inputs: &[u8], place: usize| {
        let mut other = Batch { inputs: inputs.to_vec(), ..batch.clone() };
        let before = gpt.loss(&other).unwrap();
        other.targets[place] ^= 1;
        gpt.loss(&other).unwrap() - before
    };
    let mut changed = batch.inputs.clone();
    changed[5] ^= 1;
    assert!((effect(&batch.inputs, 4) - effect(&changed, 4)).abs() < 1e-6);
    assert!((effect(&batch.inputs, 5) - effect(&changed, 5)).abs() > 1e-4);
}

#[test]
fn rows_do_not_mix_and_the_loss_is_their_mean() {
    let (two, one) = (gpt(CONFIG, 2), gpt(CONFIG, 1));
    let both = batch(CONFIG, 2, 9);
    let row = |range: std::ops::Range<usize>| {
        let (inputs, targets) = (both.inputs[range.clone()].to_vec(), both.targets[range].to_vec());
        one.loss(&Batch { rows: 1, inputs, targets }).unwrap()
    };
    let mean = (row(0..8) + row(8..16)) / 2.0;
    assert!((two.loss(&both).unwrap() - mean).abs() < 1e-5);
}

#[test]
fn loss_without_gradients_is_the_same_and_starts_near_ln_256() {
    let config = large();
    let gpt = Gpt::new(config, 2).unwrap();
    for param in config.params() {
        let mut values = vec![0.0; param.len()];
        param.fill(1, &mut values);
        gpt.weights().set(&param.name, &values).unwrap();
    }
    let batch = batch(config, 2, 10);
    let loss = gpt.loss(&batch).unwrap();
    assert_eq!(loss.to_bits(), cut(&gpt, &batch).0.to_bits());
    assert!((loss - 256f32.ln()).abs() < 0.1, "{loss}");
}

#[test]
fn about_a_million_parameters_with_names_of_their_own() {
    let params = Config::default().params();
    let count: usize = params.iter().map(Param::len).sum();
    assert!((900_000..1_200_000).contains(&count), "{count}");
    let names: std::collections::HashSet<&str> = params.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names.len(), params.len());
    assert_eq!((params[0].name.as_str(), params[2].name.as_str()), ("wte", "h.0.ln_1.weight"));
    assert!(params.iter().all(|p| p.decays() == (p.shape.len() == 2)));
}

#[test]
fn what_does_not_fit_is_refused_with_what_would() {
    let error = |config, rows| Gpt::new(config, rows).unwrap_err().to_string();
    assert_eq!(error(Config { heads: 5, ..CONFIG }, 1), "5 heads do not divide 12 channels");
    assert!(error(CONFIG, 0).contains("at least 1"));
    let gpt = gpt(CONFIG, 2);
    let error = gpt.loss(&batch(CONFIG, 1, 1)).unwrap_err().to_string();
    assert!(error.contains("1 rows") && error.contains("2 rows of 8 bytes are needed"), "{error}");
    let error = gpt.weights().set("wte", &[0.0; 3]).unwrap_err().to_string();
    assert_eq!(error, "wte has 3072 elements, not 3");
    assert_eq!(gpt.weights().set("wtf", &[]).unwrap_err().to_string(), "the network has no parameter wtf");
}

#[test]
fn a_parameter_that_is_freed_is_not_read_until_it_is_set_again() {
    let (gpt, batch) = (gpt(CONFIG, 1), batch(CONFIG, 1, 11));
    let before = gpt.loss(&batch).unwrap();
    for name in ["wte", "wpe", "h.1.ln_2.weight", "h.0.attn.qkv.weight", "lm_head.weight"] {
        let values = numbers(gpt.weights().get(name).unwrap());
        gpt.weights().free(name).unwrap();
        assert!(gpt.loss(&batch).is_err(), "{name}");
        gpt.weights().set(name, &values).unwrap();
        assert_eq!(gpt.loss(&batch).unwrap().to_bits(), before.to_bits());
    }
}

#[test]
fn first_values_depend_on_seed_and_name_alone() {
    let fill = |param: &Param, seed| {
        let mut values = vec![0.0; param.len()];
        param.fill(seed, &mut values);
        values
    };
    let (small, large) = (CONFIG.params(), Config { layers: 9, ..CONFIG }.params());
    assert_eq!(fill(&small[0], 1), fill(&large[0], 1));
    assert_ne!(fill(&small[0], 1), fill(&small[0], 2));
    let qkv = |layer: usize| small.iter().find(|p| p.name == format!("h.{layer}.attn.qkv.weight")).unwrap();
    assert_ne!(fill(qkv(0), 1), fill(qkv(1), 1));
}
