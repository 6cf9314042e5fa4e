use super::*;
use crate::plan::{Dense, Work};
use crate::tensor::Dtype;
use proptest::prelude::*;
use safetensors::tensor::TensorView;
use safetensors::SafeTensors;
use std::collections::HashMap;

fn dtypes() -> impl Strategy<Value = Dtype> {
    prop::sample::select(vec![
        Dtype::U8,
        Dtype::BOOL,
        Dtype::I32,
        Dtype::I64,
        Dtype::F16,
        Dtype::BF16,
        Dtype::F32,
    ])
}

/// Items of one to four tensors, with names that need escaping and tensors that hold nothing.
fn plans() -> impl Strategy<Value = (Vec<Item>, Vec<OutputTensor>)> {
    let tensor = (
        dtypes(),
        prop::collection::vec(0usize..6, 0..4),
        "[a-z.\"\\\\\u{e9}\u{1}]{0,9}",
    );
    prop::collection::vec(prop::collection::vec(tensor, 1..4), 1..12).prop_map(|groups| {
        let (mut items, mut tensors) = (Vec::new(), Vec::new());
        for group in groups {
            let begin = tensors.len();
            for (dtype, shape, name) in group {
                let len = (shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64;
                let name = format!("{name}{}", tensors.len());
                tensors.push(OutputTensor {
                    name,
                    dtype,
                    shape,
                    shard: 0,
                    offset: 0,
                    len,
                });
            }
            let (name, reason, parts) = (String::new(), String::new(), Vec::new());
            items.push(Item {
                work: Work::Copy(Dense { name, reason, parts }),
                outputs: begin..tensors.len(),
            });
        }
        (items, tensors)
    })
}

fn metadata(_: &[&Item]) -> Metadata {
    let mut metadata = Metadata::default();
    metadata.insert("format", "pt");
    metadata
}

proptest! {
    #[test]
    fn tensors_tile_their_files((items, mut tensors) in plans(), max in 1u64..6000) {
        let placed = place("model", &items, &mut tensors, max, metadata).unwrap();
        for (shard, file) in placed.files.iter().enumerate() {
            let mut spans: Vec<(u64, u64)> = tensors
                .iter()
                .filter(|tensor| tensor.shard == shard)
                .map(|tensor| (tensor.offset, tensor.offset + tensor.len))
                .collect();
            spans.sort();
            let mut end = file.header.len() as u64;
            for span in spans {
                prop_assert_eq!(span.0, end, "a gap or an overlap in {}", file.name);
                end = span.1;
            }
            prop_assert_eq!(end, file.len);
            let held: Vec<&Item> = items.iter().filter(|item| tensors[item.outputs.start].shard == shard).collect();
            prop_assert!(file.len <= max || held.len() == 1, "{} has {} bytes of {max}", file.name, file.len);
            for item in held {
                prop_assert!(tensors[item.outputs.clone()].iter().all(|tensor| tensor.shard == shard));
            }
        }
    }

    /// The header, and so the order of the tensors and their offsets, is byte for byte the safetensors crate's.
    #[test]
    fn headers_are_those_of_safetensors((items, mut tensors) in plans(), max in 1u64..6000) {
        let placed = place("model", &items, &mut tensors, max, metadata).unwrap();
        for (shard, file) in placed.files.iter().enumerate() {
            let held: Vec<&OutputTensor> = tensors.iter().filter(|tensor| tensor.shard == shard).collect();
            let bytes = vec![0; held.iter().map(|tensor| tensor.len as usize).max().unwrap_or(0)];
            let views = held.iter().map(|tensor| {
                let data = &bytes[..tensor.len as usize];
                (tensor.name.clone(), TensorView::new(tensor.dtype, tensor.shape.clone(), data).unwrap())
            });
            let format: HashMap<String, String> = [("format".to_string(), "pt".to_string())].into();
            let whole = safetensors::serialize(views, Some(format)).unwrap();
            prop_assert_eq!(&whole[..file.header.len()], &file.header[..]);
            prop_assert_eq!(whole.len() as u64, file.len);
            let (_, read) = SafeTensors::read_metadata(&whole).unwrap();
            for tensor in held {
                let begin = read.info(&tensor.name).unwrap().data_offsets.0 as u64;
                prop_assert_eq!(tensor.offset, file.header.len() as u64 + begin);
            }
        }
    }

    #[test]
    fn the_index_names_every_tensor_and_their_sum((items, mut tensors) in plans(), max in 1u64..6000) {
        let placed = place("model", &items, &mut tensors, max, metadata).unwrap();
        let Some((name, bytes)) = placed.index else {
            prop_assert_eq!(placed.files.len(), 1);
            return Ok(());
        };
        prop_assert_eq!(name, "model.safetensors.index.json");
        let index: Value = serde_json::from_slice(&bytes).unwrap();
        let total: u64 = tensors.iter().map(|tensor| tensor.len).sum();
        prop_assert_eq!(&index["metadata"]["total_size"], &Value::from(total));
        let map = index["weight_map"].as_object().unwrap();
        prop_assert_eq!(map.len(), tensors.len());
        for tensor in &tensors {
            prop_assert_eq!(&map[&tensor.name], &Value::from(placed.files[tensor.shard].name.clone()));
        }
    }
}

#[test]
fn a_header_above_the_limit_is_refused() {
    let text = |len: usize| move |_: &[&Item]| [("k", "v".repeat(len))].into_iter().collect::<Metadata>();
    let most = HEADER_LIMIT as usize - r#"{"__metadata__":{"k":""}}"#.len();
    let placed = place("model", &[], &mut [], 1, text(most)).unwrap();
    assert_eq!(placed.files[0].len, 8 + HEADER_LIMIT);
    let message = place("model", &[], &mut [], 1, text(most + 1))
        .err()
        .unwrap()
        .to_string();
    let says = "model.safetensors: its header would have 100000008 bytes, more than the format's limit of 100000000";
    assert!(
        message.starts_with(says) && message.contains("--max-shard-size"),
        "{message}"
    );
}
