//! uint2 .. uint7 in ai-toolkit's file: `uintx_packed` U8 [bytes], `uintx_scale` U8 [N, G * dtype's size] (the scales'
//! bytes in the weight's dtype), `uintx_zero_point` U8 [N, G].
//!
//! Packed bytes hold codes from all over the tensor (see [`shards`](crate::kernel::shards)), so a tile is a range of
//! bytes and reads the segments of the weight behind it: `segments`, `length` apart.

mod tiles;

use super::*;
use crate::checkpoint::Metadata;
use crate::kernel::shards::{self, shards};
use crate::kernel::uintx as kernel;
use serde_json::{json, Map};
use std::collections::BTreeMap;
use tiles::{push_run, Pass, Place, Regions, Run};

const PACKED: usize = 0;
const SCALES: usize = 1;
const ZEROS: usize = 2;
const SUFFIXES: [&str; 3] = ["uintx_packed", "uintx_scale", "uintx_zero_point"];

/// In config.json, and as the plan prints it.
pub(super) const NAME: &str = "uintx";

const METADATA_KEY: &str = "aitk_quantization";

pub(super) struct Uintx {
    /// 2 to 7.
    pub bits: u8,
}

/// # Errors
/// Where the settings do not go together.
pub(super) fn select(request: &Request) -> Result<Box<dyn Scheme>, Error> {
    let qtype = request.qtype;
    let refuse = |option: &str, why: &str| Err(Error::BadRequest(format!("{option} with {qtype}: {why}")));
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
    Ok(Box::new(Uintx { bits: qtype.bits() }))
}

/// # Errors
/// Where the config lacks the bits or the group, in words.
pub(super) fn recognise(config: &Map<String, Value>, _scales: Float) -> Result<Recognised, String> {
    let count = |key: &str| {
        let value = config.get(key).ok_or_else(|| format!("{key} is missing"))?;
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        count.ok_or_else(|| format!("{key} is {value}, not a count"))
    };
    let (bits, group) = (count("bits")?, count("group_size")?);
    if !(2..=7).contains(&bits) || group == 0 {
        return Err(format!(
            "bits {bits} and group_size {group} are not those of uint2 .. uint7"
        ));
    }
    let scheme = Box::new(Uintx { bits: bits as u8 });
    Ok(Recognised { scheme, group })
}

/// A tile's packed bytes, where to read what lies beyond them, and room to unpack them.
struct PackedCodes<'a> {
    stored: &'a mut dyn Stored,
    packed: &'a [u8],
    codes: &'a mut Buffer,
    bytes: &'a mut Buffer,
}

impl Uintx {
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
    fn walk(
        &self,
        level: Level,
        shape: &Shape,
        place: &Place,
        packed: PackedCodes,
        mut each: impl FnMut(&Run, usize, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let PackedCodes {
            stored,
            packed,
            codes,
            bytes,
        } = packed;
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
        let passes = Pass::all(self.bits, shape);
        passes.iter().flat_map(|pass| pass.tiles(shape, budget)).collect()
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
        let place = Place::of(self.bits, shape, tile);
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
        let place = Place::of(self.bits, shape, tile);
        self.load(shape, &place, stored, out)?;
        let (mut stats, mut faults) = (TileStats::default(), Vec::new());
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
        let packed = PackedCodes {
            stored,
            packed: packed.bytes(),
            codes: words,
            bytes: zeros,
        };
        let pass = &place.pass;
        self.walk(level, shape, &place, packed, |run, at, codes| {
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
        })?;
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
        let mut faults = Vec::new();
        let place = Place::of(self.bits, shape, tile);
        self.load(shape, &place, stored, out)?;
        out.pieces.clear();
        if !place.first {
            return Ok(faults);
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
        let packed = PackedCodes {
            stored,
            packed: packed.bytes(),
            codes: words,
            bytes: zeros,
        };
        self.walk(level, shape, &place, packed, |run, at, codes| {
            let groups = at..at + run.groups.len();
            let kept = kernel::Stored {
                codes,
                scales: &scales.bytes()[groups.start * size..groups.end * size],
                zeros: &zero_points.bytes()[groups.clone()],
            };
            faults.extend(self.check_groups(shape, run, kept.scales, kept.zeros));
            let into = &mut all[groups.start * width..groups.end * width];
            kernel::decode(level, shape.dtype, group, kept, dtype, into);
            Ok(())
        })?;
        for (run, from) in place.runs(shape).zip(place.group_offsets(shape)) {
            let (begin, count) = (run.groups.start * width, run.groups.len() * width);
            push_run(&mut out.pieces, 0, from * width, begin, count);
        }
        // The dense groups become output 0, and its old buffer the scratch of the next tile.
        std::mem::swap(&mut out.outputs[0], &mut dense);
        out.scratch.source = dense;
        Ok(faults)
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
