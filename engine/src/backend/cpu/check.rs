//! What is checked of an op when it is put into the queue, so that the workers need not.

use super::device::{Device, Weight};
use super::layout::{BLOCK, LANES};
use super::pack::Panels;
use crate::backend::{BufferId, BufferShape, Heads, Op, WeightId};
use crate::sample::logprob::LOGPROB_WORDS;
use crate::sample::words::SAMPLING_WORDS;

impl Device {
    pub(super) fn matrix(&self, id: WeightId) -> &Panels {
        match &self.weights[id.0 as usize] {
            Weight::Matrix(p) => p,
            Weight::Vector(_) => panic!("weight {id:?} is a vector, a matrix is needed"),
        }
    }

    pub(super) fn vector(&self, id: WeightId) -> &[f32] {
        match &self.weights[id.0 as usize] {
            Weight::Vector(v) => v,
            Weight::Matrix(_) => panic!("weight {id:?} is a matrix, a vector is needed"),
        }
    }

    /// An op whose buffers are too small for its bounds is a defect of the model's code.
    pub(super) fn check(&self, op: &Op) {
        let floats = |id: BufferId, least_rows: usize, columns: usize| match self.buffers[id.0 as usize].shape {
            BufferShape::F32 { rows, cols } => {
                assert!(
                    rows >= least_rows && cols == columns,
                    "{op:?}: {id:?} is {rows} x {cols}"
                );
            }
            other => panic!("{op:?}: {id:?} is {other:?}"),
        };
        let act = |id: BufferId, least_rows: usize, inputs: usize| match self.buffers[id.0 as usize].shape {
            BufferShape::Activation { rows, k } => {
                assert!(rows >= least_rows && k == inputs, "{op:?}: {id:?} is {rows} x {k}");
            }
            other => panic!("{op:?}: {id:?} is {other:?}"),
        };
        let words = |id: BufferId, least: usize| match self.buffers[id.0 as usize].shape {
            BufferShape::U32 { len } => assert!(len >= least, "{op:?}: {id:?} has {len} words"),
            other => panic!("{op:?}: {id:?} is {other:?}"),
        };
        let padded = |w: &Panels| w.panels() * LANES;
        match *op {
            Op::Embed { table, x, rows, .. } => floats(x, rows, self.matrix(table).k()),
            Op::NormMatmul {
                x,
                norm,
                w,
                act: a,
                out,
                rows,
                ..
            } => {
                let w = self.matrix(w);
                assert_eq!(self.vector(norm).len(), w.k(), "{op:?}");
                floats(x, rows, w.k());
                act(a, rows, w.k());
                floats(out, rows, padded(w));
            }
            Op::RopeWrite {
                qkv,
                ready,
                layer,
                heads,
                rows,
                ..
            } => {
                let columns = (heads.query + 2 * heads.kv) * heads.dim;
                floats(qkv, rows, columns);
                assert!(ready.bias.is_none_or(|b| self.vector(b).len() == columns), "{op:?}");
                if let Some(norms) = ready.norms {
                    for weights in [norms.query, norms.key] {
                        assert_eq!(self.vector(weights).len(), heads.dim, "{op:?}");
                    }
                }
                assert!(self.vector(ready.rope).len().is_multiple_of(heads.dim), "{op:?}");
                self.check_kv(op, layer, heads);
            }
            Op::Attend {
                qkv,
                layer,
                heads,
                work,
                out,
                next,
                rows,
                ..
            } => {
                let k = heads.query * heads.dim;
                floats(qkv, rows, (heads.query + 2 * heads.kv) * heads.dim);
                floats(work, rows, k);
                act(out, rows, k);
                assert_eq!(self.matrix(next).k(), k, "{op:?}");
                self.check_kv(op, layer, heads);
            }
            Op::Project { act: a, w, x, rows, .. } => {
                let w = self.matrix(w);
                act(a, rows, w.k());
                floats(x, rows, padded(w));
            }
            Op::NormGateUp {
                x,
                norm,
                w,
                act: a,
                out,
                next,
                rows,
                ..
            } => {
                let (w, next) = (self.matrix(w), self.matrix(next));
                assert!(w.n() == 2 * next.k() && next.k().is_multiple_of(BLOCK), "{op:?}");
                assert_eq!(self.vector(norm).len(), w.k(), "{op:?}");
                floats(x, rows, w.k());
                act(a, rows, w.k());
                act(out, rows, next.k());
            }
            Op::Head {
                x,
                norm,
                w,
                act: a,
                logits,
                outs,
                ..
            } => {
                let w = self.matrix(w);
                assert_eq!(self.vector(norm).len(), w.k(), "{op:?}");
                floats(x, outs, w.k());
                // int8 inputs of the head come in two parts
                act(a, 2 * outs, w.k());
                floats(logits, outs, padded(w));
            }
            Op::Sample {
                logits,
                vocab,
                batch,
                outs,
            } => {
                floats(logits, outs, vocab.next_multiple_of(LANES));
                words(batch.sampling, outs * SAMPLING_WORDS);
                words(batch.sampled, outs);
                words(batch.logprobs, outs * LOGPROB_WORDS);
            }
            Op::AllReduce { .. } | Op::LayerDone { .. } => {}
        }
    }

    fn check_kv(&self, op: &Op, layer: usize, heads: Heads) {
        let shape = self.kv.as_ref().map(|p| p.shape());
        assert!(
            shape.is_some_and(|s| s.heads == heads && layer < s.layers),
            "{op:?}: the KV pool is {shape:?}"
        );
    }
}
