//! Built-in problems: losses with data from the trace; each rank evaluates its share of the rows.

use std::ops::Range;

use meshstep_shard::{Error, MicroBatch};
use meshstep_tensor::{DType, SliceMut, cast};

use super::key::Key;
use super::reason::Reason;
use super::replay::with_dtype;
use super::spec::Problem;
use super::trace::{Tensor, Trace};

/// Name of the only parameter of a problem.
const X: &str = "x";

/// A problem with its data. Products and sums are in f64; the gradient is rounded once, to the type of the parameter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    problem: Problem,
    dtype: DType,
    /// Rows of the matrix end to end, and the target of each row; empty for a problem without data.
    a: &'a [f64],
    b: &'a [f64],
}

impl<'a> Rows<'a> {
    /// Returns the problem that a trace names, if it names one.
    pub(super) fn of(trace: &'a Trace) -> Result<Option<Self>, Reason> {
        let Some(problem) = trace.spec.problem else { return Ok(None) };
        let mut params = trace.params();
        let x = match (params.next(), params.next()) {
            (Some((X, x)), None) => x,
            (Some((name, _)), _) => {
                return Err(stray(format!("param/{name}"), "a problem has one parameter, x"));
            }
            (None, _) => return Err(missing("param/x")),
        };
        let label = match problem {
            Problem::Rosenbrock {} => None,
            Problem::LeastSquares {} => Some("b"),
            Problem::Logistic { .. } => Some("y"),
        };
        let keys = trace.tensors.keys().filter_map(|key| match key {
            Key::Data { key } => Some(key.as_str()),
            _ => None,
        });
        let known = |key: &&str| label.is_some() && (*key == "A" || Some(*key) == label);
        if let Some(key) = keys.into_iter().find(|key| !known(key)) {
            return Err(stray(format!("data/{key}"), "the problem has no such data"));
        }
        let Some(label) = label else {
            return Ok(Some(Rows { problem, dtype: x.dtype, a: &[], b: &[] }));
        };
        let b = data(trace, label)?;
        shaped(label, b, &[b.values.len().max(1)])?;
        let a = data(trace, "A")?;
        shaped("A", a, &[b.values.len(), x.values.len()])?;
        if let (Problem::Logistic { .. }, Some(index)) =
            (problem, b.values.iter().position(|y| y.abs() != 1.0))
        {
            return Err(stray(format!("data/y at {index}"), "labels must be -1 and 1"));
        }
        Ok(Some(Rows { problem, dtype: x.dtype, a: &a.values, b: &b.values }))
    }

    /// Hands over this rank's part of the gradient and returns its part of the loss; the sums over all ranks are the whole.
    pub(super) fn evaluate(&self, mb: &MicroBatch<'_>, rank: usize, ranks: usize) -> Result<f64, Error> {
        let values = mb.param(X)?;
        let mut x = vec![0.0; values.len()];
        cast(values, SliceMut::from(&mut x[..]))?;
        let (loss, grad) = self.part(&x, rank, ranks);
        with_dtype(self.dtype, &grad, |grad| mb.grad(X, grad))??;
        Ok(loss)
    }

    /// Returns the share of `rank` of the loss and the gradient at `x`.
    pub(super) fn part(&self, x: &[f64], rank: usize, ranks: usize) -> (f64, Vec<f64>) {
        let mut grad = vec![0.0; x.len()];
        let loss = match self.problem {
            Problem::Rosenbrock {} => {
                share(x.len().saturating_sub(1), rank, ranks).map(|i| valley(x, &mut grad, i)).sum()
            }
            Problem::LeastSquares {} => {
                self.over_rows(x, &mut grad, share(self.b.len(), rank, ranks), |product, b| {
                    let residual = product - b;
                    (residual * residual / 2.0, residual)
                })
            }
            Problem::Logistic { l2 } => {
                let rows = share(self.b.len(), rank, ranks);
                let part = rows.len() as f64 / self.b.len() as f64;
                let data = self.over_rows(x, &mut grad, rows, |product, y| {
                    (softplus(-y * product), -y / (1.0 + libm::exp(y * product)))
                });
                grad.iter_mut().zip(x).for_each(|(g, x)| *g += part * l2 * x);
                data + part * l2 / 2.0 * x.iter().map(|x| x * x).sum::<f64>()
            }
        };
        (loss, grad)
    }

    /// Returns the part of `rows` of the mean over all rows of `term(a_i . x, b_i)`, which returns a value and its slope.
    fn over_rows(
        &self,
        x: &[f64],
        grad: &mut [f64],
        rows: Range<usize>,
        term: impl Fn(f64, f64) -> (f64, f64),
    ) -> f64 {
        let count = self.b.len() as f64;
        let one = |row: usize| {
            let a = &self.a[row * x.len()..(row + 1) * x.len()];
            let product = a.iter().zip(x).map(|(a, x)| a * x).sum();
            let (value, slope) = term(product, self.b[row]);
            grad.iter_mut().zip(a).for_each(|(g, a)| *g += slope * a / count);
            value / count
        };
        rows.map(one).sum()
    }
}

/// Returns the share of `rank` of `len` items: contiguous, and as even as possible.
fn share(len: usize, rank: usize, ranks: usize) -> Range<usize> {
    len * rank / ranks..len * (rank + 1) / ranks
}

/// Evaluates term `i` of Rosenbrock's function.
fn valley(x: &[f64], grad: &mut [f64], i: usize) -> f64 {
    let (rise, run) = (x[i + 1] - x[i] * x[i], 1.0 - x[i]);
    grad[i] += -400.0 * x[i] * rise - 2.0 * run;
    grad[i + 1] += 200.0 * rise;
    100.0 * rise * rise + run * run
}

/// Computes log(1 + exp(z)) without overflow.
fn softplus(z: f64) -> f64 {
    z.max(0.0) + libm::log1p(libm::exp(-z.abs()))
}

fn data<'a>(trace: &'a Trace, key: &str) -> Result<&'a Tensor, Reason> {
    trace.tensors.get(&Key::Data { key: key.to_owned() }).ok_or_else(|| missing(&format!("data/{key}")))
}

fn shaped(key: &str, tensor: &Tensor, wanted: &[usize]) -> Result<(), Reason> {
    if tensor.shape == wanted {
        return Ok(());
    }
    let key = Key::Data { key: key.to_owned() };
    Err(Reason::Shape { key, given: tensor.shape.clone(), wanted: wanted.to_vec() })
}

fn missing(name: &str) -> Reason {
    Reason::MissingTensor { name: name.to_owned(), why: "the problem needs it" }
}

fn stray(name: String, why: &str) -> Reason {
    Reason::StrayTensor { name, why: why.to_owned() }
}
