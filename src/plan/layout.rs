//! Where the output's bytes go: items are dealt to files in the source's order, a module's tensors always together;
//! inside a file the tensors lie in the order of safetensors' own writer.

use super::{Item, OutputFile, OutputTensor};
use crate::checkpoint::{encode_header, writer_order, Metadata, TensorEntry, HEADER_LIMIT};
use crate::error::{Error, Result};
use serde_json::{json, Map, Value};
use std::ops::Range;

/// Files, with their tensors placed.
pub(super) struct Placed {
    pub files: Vec<OutputFile>,
    pub index: Option<(String, Vec<u8>)>,
}

/// More than any header entry needs beyond the tensor's escaped name: dtype, shape and two offsets.
const ENTRY_BYTES: u64 = 160;

/// Deals `items` to files of at most `max` bytes (an item that is larger gets a file of its own), sets each tensor's
/// shard and offset, and writes the headers. `metadata` gives the `__metadata__` of a file that holds the given items.
///
/// # Errors
/// [`Error::OutputHeaderOverLimit`]: no reader of the format would take such a file.
pub(super) fn place(
    stem: &str,
    items: &[Item],
    tensors: &mut [OutputTensor],
    max: u64,
    metadata: impl Fn(&[&Item]) -> Metadata,
) -> Result<Placed> {
    let shards = deal(items, tensors, max);
    let count = shards.len();
    let files: Vec<OutputFile> = shards
        .into_iter()
        .enumerate()
        .map(|(shard, range)| {
            let members: Vec<&Item> = items[range].iter().collect();
            let name = match count {
                1 => format!("{stem}.safetensors"),
                _ => format!("{stem}-{:05}-of-{count:05}.safetensors", shard + 1),
            };
            place_file(name, shard, &members, tensors, &metadata(&members))
        })
        .collect::<Result<_>>()?;
    let index = (count > 1).then(|| (format!("{stem}.safetensors.index.json"), index(&files, tensors)));
    Ok(Placed { files, index })
}

/// Consecutive items for each file, by upper bounds of their sizes.
fn deal(items: &[Item], tensors: &[OutputTensor], max: u64) -> Vec<Range<usize>> {
    let mut shards = Vec::new();
    let (mut begin, mut used) = (0, ENTRY_BYTES);
    for (at, item) in items.iter().enumerate() {
        let size: u64 = tensors[item.outputs.clone()].iter().map(size_bound).sum();
        if at > begin && used + size > max {
            shards.push(begin..at);
            (begin, used) = (at, ENTRY_BYTES);
        }
        used += size;
    }
    shards.push(begin..items.len());
    shards
}

fn size_bound(tensor: &OutputTensor) -> u64 {
    // Escaping can lengthen a name; six bytes for one is JSON's worst case.
    let name = tensor.name.bytes().map(|byte| {
        if byte < 0x20 || matches!(byte, b'"' | b'\\') {
            6
        } else {
            1
        }
    });
    tensor.len + ENTRY_BYTES + name.sum::<u64>() + 24 * tensor.shape.len() as u64
}

fn place_file(
    name: String,
    shard: usize,
    members: &[&Item],
    tensors: &mut [OutputTensor],
    metadata: &Metadata,
) -> Result<OutputFile> {
    let mut order: Vec<usize> = members.iter().flat_map(|item| item.outputs.clone()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (&tensors[a], &tensors[b]);
        writer_order((&a.dtype, &a.name), (&b.dtype, &b.name))
    });
    let mut end = 0;
    let entries: Vec<TensorEntry> = order
        .iter()
        .map(|&at| {
            let tensor = &tensors[at];
            let begin = end;
            end += tensor.len;
            let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
            TensorEntry {
                name,
                dtype: tensor.dtype,
                shape,
                begin,
                end,
            }
        })
        .collect();
    let header = encode_header(metadata, &entries);
    // The eight bytes of its length do not count.
    let json = header.len() as u64 - 8;
    if json > HEADER_LIMIT {
        return Err(Error::OutputHeaderOverLimit {
            file: name,
            header: json,
            limit: HEADER_LIMIT,
        });
    }
    for (&at, entry) in order.iter().zip(&entries) {
        tensors[at].shard = shard;
        tensors[at].offset = header.len() as u64 + entry.begin;
    }
    Ok(OutputFile {
        name,
        len: header.len() as u64 + end,
        header,
    })
}

/// `model.safetensors.index.json` as transformers writes it: sorted names, two spaces, a final newline.
fn index(files: &[OutputFile], tensors: &[OutputTensor]) -> Vec<u8> {
    let mut sorted: Vec<&OutputTensor> = tensors.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    let weight_map: Map<String, Value> = sorted
        .iter()
        .map(|tensor| (tensor.name.clone(), files[tensor.shard].name.clone().into()))
        .collect();
    let total: u64 = tensors.iter().map(|tensor| tensor.len).sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let mut bytes = serde_json::to_vec_pretty(&index).expect("strings and numbers are JSON");
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests;
