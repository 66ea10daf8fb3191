//! The ops, as each worker runs its share of them.
//!
//! Shares are fixed halves (thirds, …): claiming work piece by piece was 10 % slower at 16 sequences. Whatever a worker computes
//! is a function of one row, one head or one panel, so the number of workers never shows in a result.

use super::act::{Act, ActKind};
use super::device::{Device, Scratch};
use super::kernels::{Attention, Out, QUERY_ROWS};
use super::layout::{BLOCK, LANES};
use super::pack::Panels;
use super::pool::{Barrier, share};
use crate::backend::{Batch, BufferId, BufferShape, Heads, NONE_ALLOWED, NOT_FINITE, Op, Ready, SEQ_WORDS, WeightId};
use crate::exec::mask_words;
use crate::sample::logprob::LOGPROB_WORDS;
use crate::sample::{self, Unchosen, Work, logprob, words};

/// Panels that a worker's share is a multiple of: the width of the widest tile.
const SHARE_PANELS: usize = 4;

/// Floats of a worker's attention memory: the kernel's scratch and the output of one tile.
pub(super) const fn attention_scratch(dim: usize, group: usize) -> usize {
    let rows = if group > QUERY_ROWS { group } else { QUERY_ROWS };
    Attention::scratch_len(dim, group) + rows * dim
}

/// Runs all ops as worker `t` of `threads`; every worker runs the same list.
pub(super) fn run(
    device: &Device,
    queue: &[Op],
    barrier: &Barrier,
    t: usize,
    threads: usize,
    on_layer: &mut dyn FnMut(u32),
) {
    let worker = Worker {
        device,
        barrier,
        t,
        threads,
        scratch: &device.scratch[t],
    };
    let mut i = 0;
    while i < queue.len() {
        // SAFETY: `Device::check` has compared every op's buffers with its bounds; what the batch buffers hold was checked by whoever
        // wrote them; workers write disjoint shares, with a barrier before anybody reads them.
        i += unsafe { worker.step(&queue[i..], on_layer) };
    }
}

/// One worker during one pass.
struct Worker<'a> {
    device: &'a Device,
    barrier: &'a Barrier,
    t: usize,
    threads: usize,
    scratch: &'a Scratch,
}

/// True counts of the step.
struct Counts {
    rows: usize,
    seqs: usize,
    outs: usize,
    longest: usize,
}

/// A sequence's rows.
#[derive(Clone, Copy)]
struct Seq<'a> {
    first_row: usize,
    rows: usize,
    first_position: usize,
    pages: &'a [u32],
}

/// Tokens of one sequence against one KV head.
struct Item<'a> {
    seq: Seq<'a>,
    head: usize,
    token: usize,
    tokens: usize,
}

impl<'a> Worker<'a> {
    /// Runs the first op, or the first two where they are better done together. Returns how many.
    unsafe fn step(&self, ops: &[Op], on_layer: &mut dyn FnMut(u32)) -> usize {
        // SAFETY: see `run`.
        unsafe {
            match ops[0] {
                Op::Embed { table, x, batch, rows } => {
                    let rows = self.rows(&batch, rows);
                    let (table, tokens) = (self.device.matrix(table), self.words(batch.tokens));
                    for r in self.share(rows, 1) {
                        let to = self.floats(x).add(r * table.k());
                        table.row(tokens[r] as usize, std::slice::from_raw_parts_mut(to, table.k()));
                    }
                }
                Op::NormMatmul {
                    x,
                    norm,
                    eps,
                    w,
                    act,
                    out,
                    batch,
                    rows,
                } => {
                    let rows = self.rows(&batch, rows);
                    let w = self.device.matrix(w);
                    let x = self.floats(x);
                    let a = self.norm_act(|r| x.add(r * w.k()), norm, eps, w, act, rows, false);
                    let out = Out {
                        ptr: self.floats(out),
                        ld: w.panels() * LANES,
                        first_panel: 0,
                        add: false,
                    };
                    self.matmul(w, a, rows, out);
                }
                Op::RopeWrite {
                    qkv,
                    ready,
                    layer,
                    heads,
                    batch,
                    rows,
                } => {
                    let counts = self.counts(&batch);
                    if let Some(&Op::Attend { work, out, next, .. }) = ops.get(1)
                        && counts.longest == 1
                    {
                        // a head's keys are read by the item that writes them only: no barrier between the two
                        self.attend(qkv, layer, heads, work, out, next, &batch, &counts, Some(ready));
                        self.barrier.wait();
                        return 2;
                    }
                    for r in self.share(self.rows(&batch, rows), 1) {
                        for h in 0..heads.kv {
                            self.rope_write(qkv, ready, layer, heads, &batch, r, h);
                        }
                    }
                }
                Op::Attend {
                    qkv,
                    layer,
                    heads,
                    work,
                    out,
                    next,
                    batch,
                    ..
                } => {
                    self.attend(qkv, layer, heads, work, out, next, &batch, &self.counts(&batch), None);
                }
                Op::Project {
                    act,
                    w,
                    x,
                    residual,
                    batch,
                    rows,
                } => {
                    let w = self.device.matrix(w);
                    let out = Out {
                        ptr: self.floats(x),
                        ld: w.panels() * LANES,
                        first_panel: 0,
                        add: residual,
                    };
                    self.matmul(w, self.act(act), self.rows(&batch, rows), out);
                }
                Op::AllReduce { x, batch, rows } => {
                    let context = &self.device.context;
                    if context.communicator.ranks() == 1 {
                        return 1;
                    }
                    if self.t == 0
                        && let BufferShape::F32 { cols, .. } = self.device.buffers[x.0 as usize].shape
                    {
                        let len = self.rows(&batch, rows) * cols;
                        context
                            .communicator
                            .all_reduce(context.rank, std::slice::from_raw_parts_mut(self.floats(x), len));
                    }
                }
                Op::NormGateUp {
                    x,
                    norm,
                    eps,
                    w,
                    act,
                    out,
                    next,
                    batch,
                    rows,
                } => {
                    let rows = self.rows(&batch, rows);
                    let (w, next) = (self.device.matrix(w), self.device.matrix(next));
                    let x = self.floats(x);
                    let a = self.norm_act(|r| x.add(r * w.k()), norm, eps, w, act, rows, false);
                    self.gate_up(w, a, self.act(out), next, rows);
                }
                Op::Head {
                    x,
                    norm,
                    eps,
                    w,
                    act,
                    logits,
                    batch,
                    outs,
                } => {
                    let outs = self.outs(&batch, outs);
                    let w = self.device.matrix(w);
                    let (x, out_rows) = (self.floats(x), self.words(batch.out_rows));
                    let fine = w.act() == ActKind::Int8;
                    let a = self.norm_act(|o| x.add(out_rows[o] as usize * w.k()), norm, eps, w, act, outs, fine);
                    let out = Out {
                        ptr: self.floats(logits),
                        ld: w.panels() * LANES,
                        first_panel: 0,
                        add: false,
                    };
                    if fine {
                        self.matmul_fine(w, a, outs, out);
                    } else {
                        self.matmul(w, a, outs, out);
                    }
                }
                Op::Sample {
                    logits,
                    vocab,
                    batch,
                    outs,
                } => {
                    for o in self.share(self.outs(&batch, outs), 1) {
                        self.sample(logits, vocab, &batch, o);
                    }
                }
                Op::LayerDone { layer } => {
                    on_layer(layer);
                    return 1;
                }
            }
            self.barrier.wait();
            1
        }
    }

    fn share(&self, len: usize, unit: usize) -> std::ops::Range<usize> {
        share(len, unit, self.t, self.threads)
    }

    fn floats(&self, id: BufferId) -> *mut f32 {
        self.device.buffers[id.0 as usize].memory.ptr()
    }

    fn act(&self, id: BufferId) -> Act {
        let b = &self.device.buffers[id.0 as usize];
        match b.shape {
            BufferShape::Activation { rows, k } => Act::new(b.memory.ptr(), rows, k),
            other => panic!("{id:?} is {other:?}"),
        }
    }

    fn words(&self, id: BufferId) -> &'a [u32] {
        let b = &self.device.buffers[id.0 as usize];
        match b.shape {
            // SAFETY: the buffer's length; the batch buffers that are read through this are not written during a pass.
            BufferShape::U32 { len } => unsafe { std::slice::from_raw_parts(b.memory.ptr(), len) },
            other => panic!("{id:?} is {other:?}"),
        }
    }

    fn counts(&self, batch: &Batch) -> Counts {
        let c = self.words(batch.counts);
        Counts {
            rows: c[0] as usize,
            seqs: c[1] as usize,
            outs: c[2] as usize,
            longest: c[3] as usize,
        }
    }

    fn rows(&self, batch: &Batch, bound: usize) -> usize {
        let rows = self.counts(batch).rows;
        assert!(rows <= bound, "{rows} rows in a bucket of {bound}");
        rows
    }

    fn outs(&self, batch: &Batch, bound: usize) -> usize {
        let outs = self.counts(batch).outs;
        assert!(outs <= bound, "{outs} sampled rows in a bucket of {bound}");
        outs
    }

    /// Norms rows into the inputs of `w`. Rows are shared and a barrier follows, except that every worker norms a single row
    /// for itself: cheaper than a barrier. With `fine` what rounding to int8 lost follows as as many rows more.
    #[expect(clippy::too_many_arguments, reason = "the fields of one op")]
    unsafe fn norm_act(
        &self,
        x: impl Fn(usize) -> *const f32,
        norm: WeightId,
        eps: f32,
        w: &Panels,
        act: BufferId,
        rows: usize,
        fine: bool,
    ) -> Act {
        let norm = self.device.vector(norm);
        let (k, kernels) = (w.k(), &self.device.kernels);
        let one = rows == 1;
        let all = if fine { 2 * rows } else { rows };
        let a = if one {
            Act::new(self.scratch.act.ptr(), all, k)
        } else {
            self.act(act)
        };
        let mine = if one { 0..1 } else { self.share(rows, 1) };
        let normed = self.scratch.row.ptr::<f32>();
        for r in mine {
            // SAFETY: see `run`.
            unsafe {
                (kernels.rms_norm)(x(r), norm.as_ptr(), k, eps, normed);
                self.fill(normed, w, a, r, all);
                if fine {
                    a.int8().subtract(r, normed, kernels.flip(all));
                    self.fill(normed, w, a, rows + r, all);
                }
            }
        }
        if !one {
            self.barrier.wait();
        }
        a
    }

    /// Row `r` of `rows` as input of `w`.
    unsafe fn fill(&self, x: *const f32, w: &Panels, a: Act, r: usize, rows: usize) {
        let kernels = &self.device.kernels;
        // SAFETY: see `run`.
        unsafe {
            match w.act() {
                ActKind::Int8 => (kernels.quantise8)(x, w.k() / BLOCK, &a.int8(), r, 0, kernels.flip(rows)),
                ActKind::Float => x.copy_to_nonoverlapping(a.float().x.add(r * w.k()), w.k()),
            }
        }
    }

    /// This worker's panels of `w` times `a`.
    unsafe fn matmul(&self, w: &Panels, a: Act, rows: usize, out: Out) {
        let panels = self.share(w.panels(), SHARE_PANELS);
        // SAFETY: see `run`.
        unsafe { self.matmul_panels(w, panels, a, rows, out) };
    }

    /// This worker's panels of `w` times inputs made with `fine`: a row is the sum of two. One rounding to int8 fewer, for the matrix
    /// whose outputs are the logits; where weights come from memory the second row costs nothing.
    unsafe fn matmul_fine(&self, w: &Panels, a: Act, rows: usize, out: Out) {
        const PANELS: usize = 2 * BLOCK / LANES;
        let both = self.scratch.gate_up.ptr::<f32>();
        let mine = self.share(w.panels(), SHARE_PANELS);
        for p in mine.clone().step_by(PANELS) {
            let panels = p..mine.end.min(p + PANELS);
            let columns = panels.len() * LANES;
            let dst = Out {
                ptr: both,
                ld: PANELS * LANES,
                first_panel: p,
                add: false,
            };
            // SAFETY: see `run`; the memory for gate and up holds 64 columns of as many rows as any input has.
            unsafe {
                self.matmul_panels(w, panels, a, 2 * rows, dst);
                for r in 0..rows {
                    let (coarse, rest) = (both.add(r * dst.ld), both.add((rows + r) * dst.ld));
                    let o = out.panel(p).add(r * out.ld);
                    for c in 0..columns {
                        *o.add(c) = *coarse.add(c) + *rest.add(c);
                    }
                }
            }
        }
    }

    unsafe fn matmul_panels(&self, w: &Panels, panels: std::ops::Range<usize>, a: Act, rows: usize, out: Out) {
        let kernels = &self.device.kernels;
        if rows == 0 || panels.is_empty() {
            return;
        }
        for part in w.parts(panels) {
            // SAFETY: see `run`.
            unsafe {
                match w.act() {
                    ActKind::Int8 => (kernels.matmul_int8)(&part, &a.int8(), rows, out, self.scratch.matmul.ptr()),
                    ActKind::Float => (kernels.matmul_float)(&part, &a.float(), rows, out),
                }
            }
        }
    }

    /// Makes one row's query group, key and value of KV head `h` ready, and writes key and value to the row's slot.
    #[expect(clippy::too_many_arguments, reason = "the fields of one op")]
    unsafe fn rope_write(
        &self,
        qkv: BufferId,
        ready: Ready,
        layer: usize,
        heads: Heads,
        batch: &Batch,
        r: usize,
        h: usize,
    ) {
        let kernels = &self.device.kernels;
        let Some(kv) = &self.device.kv else { return };
        let dim = heads.dim;
        let position = self.words(batch.positions)[r] as usize;
        let table = &self.device.vector(ready.rope)[position * dim..][..dim];
        let scale = 1.0 / (dim as f32).sqrt();
        let (slot, (keys, values)) = (self.words(batch.slots)[r] as usize, kv.head(layer, h));
        let (key_at, value_at) = kv.slot(slot);
        // columns of the row
        let queries = (h * heads.group()..(h + 1) * heads.group()).map(|q| q * dim);
        let (key, value) = ((heads.query + h) * dim, (heads.query + heads.kv + h) * dim);
        // SAFETY: see `run`; one head's norm has room where a row's has.
        unsafe {
            let row = self.floats(qkv).add(r * (heads.query + 2 * heads.kv) * dim);
            if let Some(bias) = ready.bias {
                let bias = self.device.vector(bias);
                for at in queries.clone().chain([key, value]) {
                    for (i, b) in bias[at..at + dim].iter().enumerate() {
                        *row.add(at + i) += b;
                    }
                }
            }
            if let Some(norms) = ready.norms {
                let normed = self.scratch.row.ptr::<f32>();
                let of_queries = queries.clone().map(|at| (at, norms.query));
                for (at, weights) in of_queries.chain([(key, norms.key)]) {
                    let weights = self.device.vector(weights).as_ptr();
                    (kernels.rms_norm)(row.add(at), weights, dim, norms.eps, normed);
                    row.add(at).copy_from_nonoverlapping(normed, dim);
                }
            }
            for at in queries {
                (kernels.rope)(row.add(at), dim, table.as_ptr(), scale);
            }
            (kernels.rope)(row.add(key), dim, table.as_ptr(), 1.0);
            (kernels.write_kv)(
                row.add(key),
                row.add(value),
                dim,
                keys.add(key_at),
                values.add(value_at),
            );
        }
    }

    /// This worker's part of attention; with `ready`, each item first does the work of `RopeWrite` for its row and head.
    #[expect(clippy::too_many_arguments, reason = "the fields of one op")]
    unsafe fn attend(
        &self,
        qkv: BufferId,
        layer: usize,
        heads: Heads,
        work: BufferId,
        out: BufferId,
        next: WeightId,
        batch: &Batch,
        counts: &Counts,
        ready: Option<Ready>,
    ) {
        let Some(kv) = &self.device.kv else { return };
        let kernels = &self.device.kernels;
        let (w, out, work) = (self.device.matrix(next), self.act(out), self.floats(work));
        let (group, dim) = (heads.group(), heads.dim);
        let (width, ld) = (group * dim, (heads.query + 2 * heads.kv) * dim);
        let own = self.scratch.attention.ptr::<f32>();
        let kind = w.act();
        // an item's columns are whole blocks: quantise them here. Otherwise in a second part
        let direct = kind == ActKind::Int8 && width.is_multiple_of(BLOCK);
        self.items(batch, counts, heads, &mut |item| {
            let row = item.seq.first_row + item.token;
            // SAFETY: see `run`.
            unsafe {
                if let Some(ready) = ready {
                    self.rope_write(qkv, ready, layer, heads, batch, row, item.head);
                }
                let (keys, values) = kv.head(layer, item.head);
                let attention = Attention {
                    q: self.floats(qkv).add(row * ld + item.head * width),
                    ldq: ld,
                    tokens: item.tokens,
                    group,
                    dim,
                    first_position: item.seq.first_position + item.token,
                    keys,
                    values,
                    page_stride: kv.page_stride(),
                    page_tokens: kv.shape().page_tokens,
                    pages: item.seq.pages,
                };
                let result = own.add(Attention::scratch_len(dim, group));
                (kernels.attend)(&attention, own, result);
                for i in 0..item.tokens {
                    let from = result.add(i * width);
                    let at = (row + i) * heads.query * dim + item.head * width;
                    if direct {
                        let first = item.head * width / BLOCK;
                        (kernels.quantise8)(
                            from,
                            width / BLOCK,
                            &out.int8(),
                            row + i,
                            first,
                            kernels.flip(counts.rows),
                        );
                    } else if kind == ActKind::Float {
                        from.copy_to_nonoverlapping(out.float().x.add(at), width);
                    } else {
                        from.copy_to_nonoverlapping(work.add(at), width);
                    }
                }
            }
        });
        if !direct && kind != ActKind::Float {
            self.barrier.wait();
            for r in self.share(counts.rows, 1) {
                // SAFETY: see `run`.
                unsafe { self.fill(work.add(r * w.k()), w, out, r, counts.rows) };
            }
        }
    }

    /// Calls `each` for this worker's items: tiles of a sequence x KV heads, cut so that the workers' costs are even.
    fn items(&self, batch: &Batch, counts: &Counts, heads: Heads, each: &mut dyn FnMut(Item<'a>)) {
        let (words, pages) = (self.words(batch.seqs), self.words(batch.pages));
        let tile = Attention::tile_tokens(heads.group());
        let walk = |visit: &mut dyn FnMut(Item<'a>, u64)| {
            for s in words.chunks_exact(SEQ_WORDS).take(counts.seqs) {
                let seq = Seq {
                    first_row: s[0] as usize,
                    rows: s[1] as usize,
                    first_position: s[2] as usize,
                    pages: &pages[s[3] as usize..],
                };
                for token in (0..seq.rows).step_by(tile) {
                    let tokens = tile.min(seq.rows - token);
                    // keys seen, and something for the rope, the write and the quantisation
                    let cost = tokens as u64 * ((seq.first_position + token + tokens) as u64 + 32);
                    for head in 0..heads.kv {
                        visit(
                            Item {
                                seq,
                                head,
                                token,
                                tokens,
                            },
                            cost,
                        );
                    }
                }
            }
        };
        let mut total = 0;
        walk(&mut |_, cost| total += cost);
        let mut before = 0;
        walk(&mut |item, cost| {
            // the worker in whose share of the cost the item's middle lies
            if (2 * before + cost) * self.threads as u64 / (2 * total) == self.t as u64 {
                each(item);
            }
            before += cost;
        });
    }

    /// This worker's groups of 32 inner columns: gate, up, silu and the input of `next`.
    unsafe fn gate_up(&self, w: &Panels, a: Act, out: Act, next: &Panels, rows: usize) {
        let kernels = &self.device.kernels;
        let (kind, k) = (next.act(), next.k());
        let both = self.scratch.gate_up.ptr::<f32>();
        let per_group = 2 * BLOCK / LANES;
        for g in self.share(k / BLOCK, 1) {
            let dst = Out {
                ptr: both,
                ld: 2 * BLOCK,
                first_panel: g * per_group,
                add: false,
            };
            // SAFETY: see `run`.
            unsafe {
                self.matmul_panels(w, g * per_group..(g + 1) * per_group, a, rows, dst);
                for r in 0..rows {
                    let from = both.add(r * 2 * BLOCK);
                    let at = r * k + g * BLOCK;
                    match kind {
                        ActKind::Int8 => {
                            let mut inner = [0.0f32; BLOCK];
                            (kernels.silu_mul)(from, inner.as_mut_ptr());
                            (kernels.quantise8)(inner.as_ptr(), 1, &out.int8(), r, g, kernels.flip(rows));
                        }
                        ActKind::Float => (kernels.silu_mul)(from, out.float().x.add(at)),
                    }
                }
            }
        }
    }

    unsafe fn sample(&self, logits: BufferId, vocab: usize, batch: &Batch, o: usize) {
        let (rows, _) = self.words(batch.sampling).as_chunks();
        let (entries, _) = self.words(batch.adjust).as_chunks();
        let p = words::Row::read(&rows[o]);
        let adjust = p.adjust(entries, self.words(batch.masks), mask_words(vocab));
        let ld = vocab.next_multiple_of(LANES);
        // SAFETY: row o of the logits and of the log-probabilities, this worker's memory, word o of the results.
        unsafe {
            let row = std::slice::from_raw_parts(self.floats(logits).add(o * ld), vocab);
            let mut work = Work {
                row: std::slice::from_raw_parts_mut(self.scratch.adjusted.ptr(), vocab),
                candidates: std::slice::from_raw_parts_mut(self.scratch.candidates.ptr(), vocab),
            };
            let chosen = sample::choose(row, &p.params, &adjust, p.position, &mut work);
            if let (Ok(token), Some(top)) = (chosen, p.logprobs) {
                let at = self.floats(batch.logprobs).cast::<u32>().add(o * LOGPROB_WORDS);
                logprob::write(
                    row,
                    token,
                    top as usize,
                    std::slice::from_raw_parts_mut(at, LOGPROB_WORDS),
                );
            }
            *self.floats(batch.sampled).cast::<u32>().add(o) = match chosen {
                Ok(token) => token,
                Err(Unchosen::NotFinite) => NOT_FINITE,
                Err(Unchosen::NoneAllowed) => NONE_ALLOWED,
            };
        }
    }
}
