//! The plan's work cut into tasks, and what tasks of one module or tensor add up to.

use super::Settings;
use crate::plan::{Decode, Item, Module, Packed, Plan, SourceRange, Work};
use crate::scheme::{Tile, TileStats};
use crate::tensor::{ErrorSums, Float, GroupCounts};
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, OnceLock};

/// Dense bytes copied as one task, at least. A tensor that is one task is hashed on its way; a larger one is read back,
/// which costs less than leaving most threads idle while one copies.
const COPY_TASK: u64 = 64 << 20;

pub(super) enum Task<'a> {
    Encode {
        item: &'a Item,
        module: &'a Module,
        tile: Tile,
        state: &'a ModuleState,
    },
    /// `base`: where the range begins in the output tensor.
    Copy {
        item: &'a Item,
        source: SourceRange,
        base: u64,
    },
    /// `base`: where the part begins in the output tensor.
    Decode {
        item: &'a Item,
        part: &'a Packed,
        dtype: Float,
        tile: Tile,
        base: u64,
    },
}

impl Task<'_> {
    pub fn item(&self) -> &Item {
        let (Task::Encode { item, .. } | Task::Copy { item, .. } | Task::Decode { item, .. }) = self;
        item
    }
}

/// What the tiles of one module add up to.
pub(super) struct ModuleState {
    pub sums: Mutex<(Vec<ErrorSums>, GroupCounts)>,
    pub blocks: usize,
}

impl ModuleState {
    pub fn add(&self, stats: TileStats) {
        let mut sums = self.sums.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        sums.0.resize(self.blocks, ErrorSums::default());
        sums.0[stats.first_block..][..stats.blocks.len()].copy_from_slice(&stats.blocks);
        sums.1 += stats.counts;
    }

    /// Blocks folded in order.
    pub fn total(&self) -> (ErrorSums, GroupCounts) {
        let sums = self.sums.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut total = ErrorSums::default();
        sums.0.iter().for_each(|&block| total += block);
        (total, sums.1)
    }
}

/// An output tensor on its way: how many tasks still write to it, and its hash when all have.
pub(super) struct TensorState {
    pub remaining: AtomicUsize,
    pub hash: OnceLock<u128>,
}

pub(super) fn tasks<'a>(plan: &'a Plan, modules: &'a [ModuleState], settings: &Settings) -> Vec<Task<'a>> {
    let budget = settings.tile_budget();
    let copy_task = COPY_TASK.max(plan.source_bytes / (2 * settings.threads as u64));
    let mut tasks = Vec::new();
    for (item, state) in plan.items.iter().zip(modules) {
        match &item.work {
            Work::Encode(module) => {
                let tiles = plan.scheme.tiles(&module.shape, budget);
                tasks.extend(tiles.into_iter().map(|tile| Task::Encode {
                    item,
                    module,
                    tile,
                    state,
                }));
            }
            Work::Copy(dense) => {
                let mut base = 0;
                for part in &dense.parts {
                    tasks.extend(copy_steps(part, copy_task).map(|source| {
                        let base = base + source.offset - part.offset;
                        Task::Copy { item, source, base }
                    }));
                    base += part.len;
                }
            }
            Work::Decode(Decode { dtype, parts }) => {
                let mut base = 0;
                for part in parts {
                    // The decoded tile, several times as large as the packed one, is what the budget must hold.
                    let packed: u64 = part.stored.iter().map(|range| range.len).sum();
                    let dense = (part.shape.elements() * dtype.size()) as u64;
                    let budget = (budget as u64 * packed / dense.max(1)) as usize;
                    let tiles = plan.scheme.tiles(&part.shape, budget);
                    let dtype = *dtype;
                    tasks.extend(tiles.into_iter().map(|tile| Task::Decode {
                        item,
                        part,
                        dtype,
                        tile,
                        base,
                    }));
                    base += dense;
                }
            }
        }
    }
    tasks
}

/// A range in steps of at most `most` bytes; an empty one is one step.
fn copy_steps(range: &SourceRange, most: u64) -> impl Iterator<Item = SourceRange> + '_ {
    (0..range.len.div_ceil(most).max(1)).map(move |at| {
        let begin = at * most;
        SourceRange {
            file: range.file,
            offset: range.offset + begin,
            len: most.min(range.len - begin),
        }
    })
}
