//! uint2 .. uint7 in ai-toolkit's file: `uintx_packed` U8 [bytes], `uintx_scale` U8 [N, G * dtype's size] (the scales'
//! bytes in the weight's dtype), `uintx_zero_point` U8 [N, G].
//!
//! Packed bytes hold codes from all over the tensor (see [`shards`](crate::kernel::shards)), so a tile is a range of
//! bytes and reads the segments of the weight behind it: `segments`, `length` apart.

use super::*;
use crate::checkpoint::Metadata;
use crate::kernel::shards::{self, shards, Shard};
use crate::kernel::uintx as kernel;
use serde_json::{json, Map};
use std::collections::BTreeMap;

const PACKED: usize = 0;
const SCALES: usize = 1;
const ZEROS: usize = 2;
const SUFFIXES: [&str; 3] = ["uintx_packed", "uintx_scale", "uintx_zero_point"];

const METADATA_KEY: &str = "aitk_quantization";

/// Weights encoded at a time, over all segments: with their codes they fit a core's second-level cache. Part of the
/// report's arithmetic, as sums are folded at the ends of steps.
const STEP_ELEMENTS: usize = 256 << 10;

pub(super) struct Uintx {
    /// 2 to 7.
    pub bits: u8,
}

/// Of the layout and its `quant_method`.
pub(super) const NAME: &str = "uintx";

/// # Errors
/// Where the settings do not go together.
pub(super) fn select(request: &Request) -> Result<Box<dyn Scheme>, Error> {
    let bits = request.qtype.bits();
    let refuse = |option: &str, why: &str| Err(Error::BadRequest(format!("{option} with uint{bits}: {why}")));
    if let Some(layout) = request.layout {
        return refuse(
            &format!("--layout {layout}"),
            "the layouts are int4's; uintN has one of its own",
        );
    }
    if request.asym {
        return refuse("--asym", "uintN always has a zero point per group");
    }
    if request.group == 0 {
        let why = "a group holds at least one weight";
        return Err(Error::BadGroup { group: 0, why });
    }
    Ok(Box::new(Uintx { bits }))
}

/// # Errors
/// What keeps the config from being read, in words.
pub(super) fn recognise(config: &Map<String, Value>, _scales: Float) -> Result<Recognised, String> {
    let count = |key: &str| config.get(key).and_then(Value::as_u64);
    let bits = match count("bits") {
        Some(bits @ 2..=7) => bits as u8,
        _ => return Err("bits is not 2 to 7".into()),
    };
    let group = match count("group_size") {
        Some(group) if group > 0 => group as usize,
        _ => return Err("group_size is not a count above 0".into()),
    };
    Ok(Recognised {
        scheme: Box::new(Uintx { bits }),
        group,
    })
}

/// Some shards of a tensor that are packed together: byte `i` of the narrowest holds the codes `i`, `i + length`, ..,
/// and of one that is `k` times as wide the byte `i + q * length` the codes of the segments `q`, `q + k`, ..
#[derive(Clone, Copy)]
struct Pass {
    shards: &'static [Shard],
    /// Of the first shard, in bytes from the start of `uintx_packed`.
    offset: usize,
    /// Bytes of the narrowest shard, which is also how many codes a segment has.
    length: usize,
    segments: usize,
    /// Where the tiles of this pass begin to count.
    base: usize,
    /// Codes of a segment that are encoded at a time.
    step: usize,
}

impl Pass {
    /// All shards in one pass, where their bytes line up. In a tensor whose size is not a multiple of the segments (the
    /// group is then not one of 8) they do not, and each shard has a pass of its own.
    fn all(bits: u8, shape: &Shape) -> Vec<Pass> {
        let (shards, elements) = (shards(bits), shape.elements());
        let narrowest = shards[shards.len() - 1];
        if elements.is_multiple_of(narrowest.codes()) {
            return vec![Pass::new(shards, 0, 0, shape)];
        }
        let mut offset = 0;
        let single = shards.chunks(1).map(|shard| {
            let pass = Pass::new(shard, offset, offset, shape);
            offset += pass.length;
            pass
        });
        single.collect()
    }

    fn new(shards: &'static [Shard], offset: usize, base: usize, shape: &Shape) -> Pass {
        let narrowest = shards[shards.len() - 1];
        let segments = narrowest.codes();
        Pass {
            shards,
            offset,
            length: narrowest.bytes(shape.elements()),
            segments,
            base,
            step: (STEP_ELEMENTS / segments).next_multiple_of(shape.group),
        }
    }

    /// How many times a shard is as wide as the narrowest.
    fn times(&self, shard: Shard) -> usize {
        self.segments / shard.codes()
    }

    /// Packed bytes for each byte of the narrowest shard.
    fn width(&self) -> usize {
        self.shards.iter().map(|&shard| self.times(shard)).sum()
    }

    fn steps(&self) -> usize {
        self.length.div_ceil(self.step)
    }
}

/// Some codes of one segment and the groups that begin among them.
struct Run {
    /// Codes, counted through the tensor.
    codes: Range<usize>,
    groups: Range<usize>,
}

impl Run {
    fn new(shape: &Shape, pass: &Pass, segment: usize, bytes: &Range<usize>) -> Run {
        let at = |byte: usize| (segment * pass.length + byte).min(shape.elements());
        let codes = at(bytes.start)..at(bytes.end);
        let groups = codes.start.div_ceil(shape.group)..codes.end.div_ceil(shape.group);
        Run { codes, groups }
    }

    /// The codes of its groups: the last may reach beyond the run's.
    fn whole(&self, shape: &Shape) -> Range<usize> {
        self.groups.start * shape.group..self.groups.end * shape.group
    }
}

/// A tile's place: a pass, and a range of the bytes of its narrowest shard.
struct Place {
    pass: Pass,
    bytes: Range<usize>,
    /// Whether it holds the scales, zero points and sums: each pass reads all weights, and the first keeps them.
    first: bool,
}

impl Place {
    fn steps(&self) -> impl Iterator<Item = Range<usize>> {
        let (end, step) = (self.bytes.end, self.pass.step);
        self.bytes
            .clone()
            .step_by(step)
            .map(move |begin| begin..(begin + step).min(end))
    }

    /// Where the tile's part of shard `index` begins in its buffer.
    fn from(&self, index: usize) -> usize {
        let before = self.pass.shards[..index].iter().map(|&shard| self.pass.times(shard));
        before.sum::<usize>() * self.bytes.len()
    }

    /// The runs of the whole tile, one per segment; none where another pass has them.
    fn runs<'a>(&'a self, shape: &'a Shape) -> impl Iterator<Item = Run> + 'a {
        let segments = if self.first { self.pass.segments } else { 0 };
        (0..segments).map(|segment| Run::new(shape, &self.pass, segment, &self.bytes))
    }

    /// Group of the tile, in the order of its runs, at which each segment begins.
    fn group_offsets(&self, shape: &Shape) -> [usize; 8] {
        let mut offsets = [0; 8];
        let mut sum = 0;
        for (offset, run) in offsets.iter_mut().zip(self.runs(shape)) {
            *offset = sum;
            sum += run.groups.len();
        }
        offsets
    }
}

/// Codes of one step, a region for each segment. A region has room for a group that begins before the segment's codes
/// and for one that ends after them.
struct Regions {
    stride: usize,
}

impl Regions {
    fn new(shape: &Shape, pass: &Pass) -> Regions {
        Regions {
            stride: pass.step + 2 * shape.group,
        }
    }

    fn len(&self, pass: &Pass) -> usize {
        self.stride * pass.segments
    }

    /// The segments of a shard's byte run `q`, of the starts of all segments.
    fn starts(pass: &Pass, shard: Shard, q: usize, all: &[usize; 8]) -> [usize; 8] {
        let times = pass.times(shard);
        std::array::from_fn(|j| all.get(q + j * times).copied().unwrap_or(0))
    }
}

/// Appends a run of bytes, joined to the last piece where it continues it.
fn push_run(pieces: &mut Vec<Piece>, output: usize, from: usize, offset: usize, width: usize) {
    if width == 0 {
        return;
    }
    match pieces.last_mut() {
        Some(last)
            if last.output == output
                && last.from + last.width == from
                && last.offset + last.width as u64 == offset as u64 =>
        {
            last.width += width;
        }
        _ => pieces.push(Piece::run(output, from, offset as u64, width)),
    }
}

impl Uintx {
    fn place(&self, shape: &Shape, tile: &Tile) -> Place {
        let passes = Pass::all(self.bits, shape);
        let index = passes.iter().rposition(|pass| pass.base <= tile.begin).unwrap_or(0);
        let pass = passes[index];
        Place {
            pass,
            bytes: tile.begin - pass.base..tile.end - pass.base,
            first: index == 0,
        }
    }

    /// Sizes the tile's buffers and notes where they belong.
    fn lay_out(&self, shape: &Shape, place: &Place, out: &mut TileBuffers) {
        let (pass, bytes) = (&place.pass, &place.bytes);
        out.outputs.resize_with(SUFFIXES.len(), Buffer::default);
        out.pieces.clear();
        let mut shard_offset = pass.offset;
        for (index, &shard) in pass.shards.iter().enumerate() {
            for q in 0..pass.times(shard) {
                let from = place.from(index) + q * bytes.len();
                let offset = shard_offset + q * pass.length + bytes.start;
                push_run(&mut out.pieces, PACKED, from, offset, bytes.len());
            }
            shard_offset += pass.times(shard) * pass.length;
        }
        let offsets = place.group_offsets(shape);
        for (output, size) in [(SCALES, shape.dtype.size()), (ZEROS, 1)] {
            for (run, from) in place.runs(shape).zip(offsets) {
                let (begin, count) = (run.groups.start * size, run.groups.len() * size);
                push_run(&mut out.pieces, output, from * size, begin, count);
            }
        }
        let groups: usize = place.runs(shape).map(|run| run.groups.len()).sum();
        out.outputs[PACKED].resize(pass.width() * bytes.len());
        out.outputs[SCALES].resize(groups * shape.dtype.size());
        out.outputs[ZEROS].resize(groups);
    }

    /// Reads the codes `range` of a tensor from wherever they are packed.
    fn read_codes(
        &self,
        shape: &Shape,
        stored: &mut dyn Stored,
        range: Range<usize>,
        bytes: &mut Buffer,
        codes: &mut [u8],
    ) -> Result<(), Error> {
        let mut offset = 0;
        codes.fill(0);
        for &shard in shards(self.bits) {
            let length = shard.bytes(shape.elements());
            let mut at = range.start;
            while at < range.end {
                let (index, byte) = (at / length, at % length);
                let count = (range.end - at).min(length - byte);
                let packed = bytes.take::<u8>(count);
                stored.read(PACKED, (offset + byte) as u64, packed)?;
                shards::extract(shard, index, packed, &mut codes[at - range.start..][..count]);
                at += count;
            }
            offset += length;
        }
        Ok(())
    }

    /// Calls `each` with the groups that begin in the tile, step by step and segment by segment: the run, where its
    /// groups lie in the tile's scales and zero points, and the codes of these groups.
    #[allow(clippy::too_many_arguments)]
    fn walk(
        &self,
        level: Level,
        shape: &Shape,
        place: &Place,
        stored: &mut dyn Stored,
        packed: &[u8],
        (codes, bytes): (&mut Buffer, &mut Buffer),
        mut each: impl FnMut(&Run, usize, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let pass = &place.pass;
        let together = pass.shards.len() == shards(self.bits).len();
        let regions = Regions::new(shape, pass);
        let codes = codes.take::<u8>(regions.len(pass));
        let mut offsets = place.group_offsets(shape);
        for step in place.steps() {
            let starts: [usize; 8] = std::array::from_fn(|segment| segment * regions.stride);
            if together {
                for (index, &shard) in pass.shards.iter().enumerate() {
                    for q in 0..pass.times(shard) {
                        let from = place.from(index) + q * place.bytes.len() + step.start - place.bytes.start;
                        let starts = Regions::starts(pass, shard, q, &starts);
                        let packed = &packed[from..][..step.len()];
                        shards::unpack(level, shard, packed, codes, &starts[..shard.codes()]);
                    }
                }
            }
            for segment in 0..pass.segments {
                let run = Run::new(shape, pass, segment, &step);
                let whole = run.whole(shape);
                if whole.is_empty() {
                    continue;
                }
                let skip = whole.start - run.codes.start;
                let region = &mut codes[starts[segment]..][..skip + whole.len()];
                let known = if together {
                    whole.end.min(run.codes.end)
                } else {
                    whole.start
                };
                let rest = &mut region[known - run.codes.start..];
                self.read_codes(shape, stored, known..whole.end, bytes, rest)?;
                each(&run, offsets[segment], &region[skip..])?;
                offsets[segment] += run.groups.len();
            }
        }
        Ok(())
    }

    fn load(&self, shape: &Shape, place: &Place, stored: &mut dyn Stored, out: &mut TileBuffers) -> Result<(), Error> {
        self.lay_out(shape, place, out);
        for piece in &out.pieces {
            read_piece(stored, piece, out.outputs[piece.output].bytes_mut())?;
        }
        Ok(())
    }

    /// Scales finite and above 0, zero points no larger than the largest code.
    fn check_groups(&self, shape: &Shape, run: &Run, scales: &[u8], zeros: &[u8]) -> Option<StoredFault> {
        let place = |index: usize| {
            let group = run.groups.start + index;
            format!("row {}, group {}", group / shape.groups(), group % shape.groups())
        };
        let scale = |index: usize| crate::kernel::reference::weight(shape.dtype, scales, index);
        let bad = |index: &usize| !(scale(*index).is_finite() && scale(*index) > 0.0);
        if let Some(index) = (0..zeros.len()).find(bad) {
            return Some(StoredFault {
                suffix: SUFFIXES[SCALES],
                what: format!("holds the scale {} at {}", scale(index), place(index)),
            });
        }
        let top = (1 << self.bits) - 1;
        let index = zeros.iter().position(|&zero| zero > top)?;
        Some(StoredFault {
            suffix: SUFFIXES[ZEROS],
            what: format!(
                "holds {} at {}, and uint{} ends at {top}",
                zeros[index],
                place(index),
                self.bits
            ),
        })
    }
}

impl Scheme for Uintx {
    fn qtype(&self) -> QType {
        QType::Uint(self.bits)
    }

    fn layout(&self) -> &'static str {
        NAME
    }

    fn symmetric(&self) -> bool {
        false
    }

    fn outputs(&self, shape: &Shape) -> Vec<OutputSpec> {
        let packed = shards(self.bits)
            .iter()
            .map(|shard| shard.bytes(shape.elements()))
            .sum();
        let (n, g) = (shape.rows, shape.groups());
        vec![
            OutputSpec::new(SUFFIXES[PACKED], Dtype::U8, vec![packed]),
            OutputSpec::new(SUFFIXES[SCALES], Dtype::U8, vec![n, g * shape.dtype.size()]),
            OutputSpec::new(SUFFIXES[ZEROS], Dtype::U8, vec![n, g]),
        ]
    }

    fn bits_per_weight(&self, group: usize, dtype: Float) -> f64 {
        f64::from(self.bits) + (8 * dtype.size() + 8) as f64 / group as f64
    }

    fn refuse(&self, shape: &Shape) -> Option<String> {
        if shape.elements() == 0 {
            return Some(format!(
                "its shape [{}, {}] holds no weights",
                shape.rows, shape.columns
            ));
        }
        (!shape.columns.is_multiple_of(shape.group)).then(|| {
            format!(
                "in_features {} is not divisible by the group of {}",
                shape.columns, shape.group
            )
        })
    }

    fn tiles(&self, shape: &Shape, budget: usize) -> Vec<Tile> {
        let tiles_of = |pass: Pass| {
            // Whole steps, as even as they come.
            let most = (budget / pass.width() / pass.step).max(1);
            let count = pass.steps().div_ceil(most);
            let each = pass.steps().div_ceil(count) * pass.step;
            (0..pass.length).step_by(each).map(move |begin| {
                let bytes = begin..(begin + each).min(pass.length);
                let codes = |segment| Run::new(shape, &pass, segment, &bytes).codes.len();
                let read = (0..pass.segments).map(codes).sum::<usize>() * shape.dtype.size();
                Tile {
                    begin: pass.base + bytes.start,
                    end: pass.base + bytes.end,
                    source_bytes: if pass.base == 0 { read as u64 } else { 0 },
                }
            })
        };
        Pass::all(self.bits, shape).into_iter().flat_map(tiles_of).collect()
    }

    fn blocks(&self, shape: &Shape) -> usize {
        let first = Pass::all(self.bits, shape)[0];
        first.steps() * first.segments
    }

    fn encode(
        &self,
        level: Level,
        shape: &Shape,
        tile: &Tile,
        weights: &mut dyn Weights,
        out: &mut TileBuffers,
    ) -> Result<TileStats, TileError> {
        let place = self.place(shape, tile);
        self.lay_out(shape, &place, out);
        let (pass, size, group) = (&place.pass, shape.dtype.size(), shape.group);
        let regions = Regions::new(shape, pass);
        let mut offsets = place.group_offsets(shape);
        let mut stats = TileStats {
            first_block: place.bytes.start / pass.step * pass.segments,
            ..TileStats::default()
        };
        let Scratch {
            source,
            words,
            scales,
            zeros,
            ..
        } = &mut out.scratch;
        let codes = words.take::<u8>(regions.len(pass));
        for step in place.steps() {
            let mut starts = [0; 8];
            for segment in 0..pass.segments {
                let run = Run::new(shape, pass, segment, &step);
                // Groups that the codes touch: one may have begun before them.
                let begin = run.codes.start / group;
                let count = run.groups.end.saturating_sub(begin);
                let source = source.take::<u8>(count * group * size);
                weights.read((begin * group * size) as u64, source)?;
                let region = &mut codes[segment * regions.stride..][..regions.stride];
                let scales = scales.take::<u8>(count * size);
                let zeros = zeros.take::<u8>(count);
                let lead = (run.groups.start - begin).min(count);
                let mut part = |groups: Range<usize>| {
                    let codes = groups.start * group..groups.end * group;
                    let bytes = groups.start * size..groups.end * size;
                    let tile = kernel::Tile {
                        codes: &mut region[codes.clone()],
                        scales: &mut scales[bytes],
                        zeros: &mut zeros[groups],
                    };
                    let weights = &source[codes.start * size..codes.end * size];
                    kernel::encode(level, shape.dtype, self.bits, group, weights, tile)
                        .map_err(|fault| TileError::Fault(fault.shifted(begin * group + codes.start)))
                };
                part(0..lead)?;
                let (sums, counts) = part(lead..count)?;
                if place.first {
                    stats.blocks.push(sums);
                    stats.counts += counts;
                    let (at, owned) = (offsets[segment], count - lead);
                    out.outputs[SCALES].bytes_mut()[at * size..(at + owned) * size]
                        .copy_from_slice(&scales[lead * size..]);
                    out.outputs[ZEROS].bytes_mut()[at..at + owned].copy_from_slice(&zeros[lead..]);
                    offsets[segment] += owned;
                }
                let skip = run.codes.start - begin * group;
                starts[segment] = segment * regions.stride + skip;
                // Beyond the end of the tensor the last segment is padded.
                region[skip + run.codes.len()..][..step.len() - run.codes.len()].fill(0);
            }
            for (index, &shard) in pass.shards.iter().enumerate() {
                for q in 0..pass.times(shard) {
                    let from = place.from(index) + q * place.bytes.len() + step.start - place.bytes.start;
                    let starts = Regions::starts(pass, shard, q, &starts);
                    let packed = &mut out.outputs[PACKED].bytes_mut()[from..][..step.len()];
                    shards::pack(level, shard, codes, &starts[..shard.codes()], packed);
                }
            }
        }
        Ok(stats)
    }

    fn measure(
        &self,
        level: Level,
        shape: &Shape,
        tile: &Tile,
        stored: &mut dyn Stored,
        mut weights: Option<&mut dyn Weights>,
        out: &mut TileBuffers,
    ) -> Result<Measured, Error> {
        let mut faults = Vec::new();
        let place = self.place(shape, tile);
        self.load(shape, &place, stored, out)?;
        let mut stats = TileStats::default();
        if !place.first {
            return Ok(Measured { stats, faults });
        }
        stats.first_block = place.bytes.start / place.pass.step * place.pass.segments;
        let size = shape.dtype.size();
        let Scratch {
            source, words, zeros, ..
        } = &mut out.scratch;
        let [packed, scales, zero_points] = &out.outputs[..] else {
            unreachable!("lay_out makes three buffers")
        };
        let pass = &place.pass;
        self.walk(
            level,
            shape,
            &place,
            stored,
            packed.bytes(),
            (words, zeros),
            |run, at, codes| {
                let groups = at..at + run.groups.len();
                let kept = kernel::Stored {
                    codes,
                    scales: &scales.bytes()[groups.start * size..groups.end * size],
                    zeros: &zero_points.bytes()[groups],
                };
                faults.extend(self.check_groups(shape, run, kept.scales, kept.zeros));
                let Some(weights) = weights.as_deref_mut() else {
                    return Ok(());
                };
                let whole = run.whole(shape);
                let source = source.take::<u8>(whole.len() * size);
                weights.read((whole.start * size) as u64, source)?;
                // Runs without a group of their own are not walked, and their block is empty.
                let step = (run.codes.start % pass.length - place.bytes.start) / pass.step;
                let segment = run.codes.start / pass.length;
                stats
                    .blocks
                    .resize(step * pass.segments + segment, ErrorSums::default());
                stats
                    .blocks
                    .push(kernel::measure(level, shape.dtype, shape.group, source, kept));
                Ok(())
            },
        )?;
        Ok(Measured { stats, faults })
    }

    fn decode(
        &self,
        level: Level,
        shape: &Shape,
        tile: &Tile,
        stored: &mut dyn Stored,
        dtype: Float,
        out: &mut TileBuffers,
    ) -> Result<Vec<StoredFault>, Error> {
        let place = self.place(shape, tile);
        self.load(shape, &place, stored, out)?;
        out.pieces.clear();
        if !place.first {
            return Ok(Vec::new());
        }
        let (size, group) = (shape.dtype.size(), shape.group);
        let width = group * dtype.size();
        let mut dense = std::mem::take(&mut out.scratch.source);
        let groups: usize = place.runs(shape).map(|run| run.groups.len()).sum();
        let all = dense.take::<u8>(groups * width);
        let Scratch { words, zeros, .. } = &mut out.scratch;
        let [packed, scales, zero_points] = &out.outputs[..] else {
            unreachable!("lay_out makes three buffers")
        };
        self.walk(
            level,
            shape,
            &place,
            stored,
            packed.bytes(),
            (words, zeros),
            |run, at, codes| {
                let groups = at..at + run.groups.len();
                let kept = kernel::Stored {
                    codes,
                    scales: &scales.bytes()[groups.start * size..groups.end * size],
                    zeros: &zero_points.bytes()[groups.clone()],
                };
                let into = &mut all[groups.start * width..groups.end * width];
                kernel::decode(level, shape.dtype, group, kept, dtype, into);
                Ok(())
            },
        )?;
        for (run, from) in place.runs(shape).zip(place.group_offsets(shape)) {
            let (begin, count) = (run.groups.start * width, run.groups.len() * width);
            push_run(&mut out.pieces, 0, from * width, begin, count);
        }
        // The dense groups become output 0, and its old buffer the scratch of the next tile.
        std::mem::swap(&mut out.outputs[0], &mut dense);
        out.scratch.source = dense;
        Ok(Vec::new())
    }

    fn config(&self, group: usize, context: &ConfigContext) -> Value {
        json!({
            "quant_method": NAME,
            "bits": self.bits,
            "group_size": group,
            "modules": context.quantized,
        })
    }

    fn metadata_key(&self) -> Option<&'static str> {
        Some(METADATA_KEY)
    }

    fn file_metadata(&self, modules: &[(&str, Float)]) -> Option<(String, String)> {
        if modules.is_empty() {
            return None;
        }
        let entry = |dtype: Float| {
            json!({
                "qtype": self.qtype().to_string(),
                "dtype": dtype.torch_name(),
                "buffers": SUFFIXES,
                "attrs": {},
            })
        };
        let modules: Map<String, Value> = modules
            .iter()
            .map(|(name, dtype)| (name.to_string(), entry(*dtype)))
            .collect();
        let value = json!({ "modules": modules, "layers_only": false });
        Some((METADATA_KEY.to_string(), value.to_string()))
    }

    fn stored_dtypes(&self, metadata: &Metadata) -> BTreeMap<String, Result<Float, String>> {
        let value = metadata.get(METADATA_KEY).unwrap_or_default();
        let modules = match serde_json::from_str(value) {
            Ok(Value::Object(mut value)) => value.remove("modules"),
            _ => None,
        };
        let Some(Value::Object(modules)) = modules else {
            return BTreeMap::new();
        };
        let dtype_of = |entry: &Value| {
            let text = |key: &str| entry.get(key).and_then(Value::as_str).unwrap_or_default();
            if text("qtype") != self.qtype().to_string() {
                return Err(format!(
                    "{METADATA_KEY} says qtype {:?}, config.json {}",
                    text("qtype"),
                    self.qtype()
                ));
            }
            if entry.get("buffers") != Some(&json!(SUFFIXES)) {
                return Err(format!(
                    "{METADATA_KEY} does not name the buffers {}",
                    SUFFIXES.join(", ")
                ));
            }
            Float::from_torch_name(text("dtype"))
                .ok_or_else(|| format!("{METADATA_KEY} says dtype {:?}", text("dtype")))
        };
        modules
            .iter()
            .map(|(name, entry)| (name.clone(), dtype_of(entry)))
            .collect()
    }

    fn writes_format(&self) -> bool {
        false
    }

    fn dense_shape(
        &self,
        outputs: &[Option<(Dtype, &[usize])>],
        group: usize,
        fallback: Float,
    ) -> Result<Shape, StoredFault> {
        let fault = |output: usize, what: String| StoredFault {
            suffix: SUFFIXES[output],
            what,
        };
        let missing = outputs.iter().position(Option::is_none);
        if let Some(output) = missing {
            return Err(fault(output, "is missing".into()));
        }
        let found = |output: usize| outputs[output].unwrap_or((Dtype::U8, &[]));
        let (Dtype::U8, &[rows, groups]) = found(ZEROS) else {
            let (dtype, shape) = found(ZEROS);
            return Err(fault(
                ZEROS,
                format!("is {dtype:?} {shape:?}, where the layout has U8 [out_features, groups]"),
            ));
        };
        let dtype = match (found(SCALES).1, fallback) {
            (&[_, bytes], _) if bytes == 4 * groups => Float::F32,
            (_, Float::F32) => Float::Bf16,
            (_, narrow) => narrow,
        };
        let columns = groups.saturating_mul(group);
        if rows.checked_mul(columns).is_none() {
            return Err(fault(
                ZEROS,
                format!("is [{rows}, {groups}], more than can be addressed"),
            ));
        }
        let shape = Shape {
            rows,
            columns,
            group,
            dtype,
        };
        for (output, expected) in self.outputs(&shape).iter().enumerate() {
            let (dtype, is) = found(output);
            if dtype != expected.dtype || is != expected.shape {
                let what = format!(
                    "is {dtype:?} {is:?}, where the module's other tensors and the group of {group} make it {:?} {:?}",
                    expected.dtype, expected.shape
                );
                return Err(fault(output, what));
            }
        }
        Ok(shape)
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &SUFFIXES
    }
}
