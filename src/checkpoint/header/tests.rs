use std::path::PathBuf;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::checkpoint::testing::{raw, safetensors};

const DTYPES: [Dtype; 22] = [
    Dtype::BOOL,
    Dtype::F4,
    Dtype::F6_E2M3,
    Dtype::F6_E3M2,
    Dtype::U8,
    Dtype::I8,
    Dtype::F8_E5M2,
    Dtype::F8_E4M3,
    Dtype::F8_E8M0,
    Dtype::F8_E4M3FNUZ,
    Dtype::F8_E5M2FNUZ,
    Dtype::I16,
    Dtype::U16,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I32,
    Dtype::U32,
    Dtype::F32,
    Dtype::C64,
    Dtype::F64,
    Dtype::I64,
    Dtype::U64,
];

struct Sample(TempDir, PathBuf);

impl Sample {
    fn new(bytes: &[u8]) -> Sample {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        std::fs::write(&path, bytes).unwrap();
        Sample(dir, path)
    }

    fn read(&self) -> Result<Header> {
        read_header(&self.1)
    }
}

/// The message for a file of these bytes, without its folder.
fn message(bytes: &[u8]) -> String {
    let sample = Sample::new(bytes);
    let message = sample.read().unwrap_err().to_string();
    message.replace(&format!("{}/", sample.0.path().display()), "")
}

fn one(dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#)
}

#[test]
fn equals_what_the_crate_wrote() {
    let cases: [&[(&str, Dtype, &[usize])]; 4] = [
        &[],
        &[("a", Dtype::F32, &[2, 3])],
        &[
            ("z", Dtype::I64, &[1]),
            ("b", Dtype::BF16, &[3]),
            ("a", Dtype::F16, &[5]),
            ("scalar", Dtype::F32, &[]),
            ("empty", Dtype::F32, &[0, 7]),
            ("f4", Dtype::F4, &[2]),
            ("i", Dtype::I32, &[4]),
            ("é\"\\\u{1}\u{7f}\n/", Dtype::U8, &[1]),
        ],
        &[
            ("b", Dtype::F32, &[0]),
            ("a", Dtype::F32, &[0]),
            ("c", Dtype::F32, &[1]),
        ],
    ];
    for tensors in cases {
        let bytes = safetensors(tensors);
        let header = Sample::new(&bytes).read().unwrap();
        assert_eq!(header.metadata.get("format"), Some("pt"));
        assert_eq!(header.file_len, bytes.len() as u64);
        assert_eq!(
            encode_header(&header.metadata, &header.tensors),
            bytes[..header.data_start as usize]
        );

        let mut sorted: Vec<_> = tensors.iter().collect();
        sorted.sort_by(|a, b| writer_order((&a.1, a.0), (&b.1, b.0)));
        let names: Vec<_> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(sorted.iter().map(|tensor| tensor.0).collect::<Vec<_>>(), names);
    }
}

#[test]
fn metadata_keeps_its_order_and_is_left_out_if_empty() {
    let metadata: Metadata = [("z", "1"), ("a", "2"), ("m", "3"), ("a", "4")].into_iter().collect();
    let bytes = encode_header(&metadata, &[]);
    assert_eq!(
        std::str::from_utf8(&bytes[8..]).unwrap().trim(),
        r#"{"__metadata__":{"z":"1","a":"4","m":"3"}}"#
    );
    assert_eq!(Sample::new(&bytes).read().unwrap().metadata, metadata);
    assert_eq!(encode_header(&Metadata::default(), &[]), raw("{}      ", 0));
}

#[test]
fn files_that_other_writers_make_are_read() {
    // Tensors in any order in the JSON, no padding, unknown keys, null metadata.
    let json = r#"{"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]},"__metadata__":null,
        "e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},"a":{"x":[{}],"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    let header = Sample::new(&raw(json, 3)).read().unwrap();
    let names: Vec<_> = header
        .tensors
        .iter()
        .map(|t| (t.name.as_str(), t.begin, t.end))
        .collect();
    assert_eq!(names, [("a", 0, 2), ("e", 2, 2), ("b", 2, 3)]);
}

#[test]
fn every_fault_of_length_has_its_message() {
    assert_eq!(
        message(b""),
        "m.safetensors: 0 bytes, too short for the 8 of a header length"
    );
    assert_eq!(
        message(&[0; 7]),
        "m.safetensors: 7 bytes, too short for the 8 of a header length"
    );
    let over = "m.safetensors: the header claims 3 bytes, the file has 10 in all (truncated or not safetensors)";
    assert_eq!(message(&[3, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']), over);
    assert!(message(&[0xff; 64]).contains("claims 18446744073709551615 bytes, the file has 64 in all"));

    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n";
    let lfs = "m.safetensors: 68 bytes of a Git LFS pointer, not the weights; `git lfs pull` fetches them";
    assert_eq!(message(pointer.as_bytes()), lfs);

    let sample = Sample::new(&100_000_001u64.to_le_bytes());
    File::options()
        .write(true)
        .open(&sample.1)
        .unwrap()
        .set_len(200_000_000)
        .unwrap();
    let message = sample.read().unwrap_err().to_string();
    assert!(message.ends_with("the header claims 100000001 bytes, more than the format's limit of 100000000"));
}

#[test]
fn every_fault_of_json_has_its_message() {
    let why = |json: &[u8]| message(&raw(json, 0)).replace("m.safetensors: the header is not valid: ", "");
    assert_eq!(why(b""), "it does not begin with '{'");
    assert_eq!(why(b" {}"), "it does not begin with '{'");
    assert_eq!(why(b"[]"), "it does not begin with '{'");
    assert!(why(b"{").starts_with("EOF while parsing"));
    assert!(why(b"{}{}").starts_with("trailing characters"));
    assert!(why(b"{\"\xff\":1}").starts_with("invalid utf-8 sequence of 1 bytes from index 2"));
    assert!(why(b"{\"w\":1}").starts_with("w: invalid type: integer `1`"));
    assert!(why(br#"{"w":{"dtype":"F32","shape":[1]}}"#).starts_with("w: missing field `data_offsets`"));
    assert!(why(one("F7", "[1]", 0, 4).as_bytes()).starts_with("w: unknown variant `F7`"));
    assert!(why(one("F32", "[-1]", 0, 4).as_bytes()).starts_with("w: invalid value: integer `-1`"));
    assert!(why(one("F32", "[1.0]", 0, 4).as_bytes()).starts_with("w: invalid type: floating point"));
    assert!(why(one("F32", "[99999999999999999999]", 0, 4).as_bytes()).starts_with("w: invalid type"));
    assert!(
        why(br#"{"w":{"dtype":"U8","shape":[],"shape":[],"data_offsets":[0,1]}}"#).starts_with("w: duplicate field")
    );
    assert!(why(br#"{"__metadata__":{"a":1}}"#).starts_with("__metadata__: a: invalid type: integer `1`"));
    assert!(why(br#"{"__metadata__":{"a":"1","a":"2"}}"#).starts_with("__metadata__: \"a\" appears twice"));
    for deep in ["[".repeat(200_000), r#"{"w":"#.repeat(200_000)] {
        assert!(why(format!(r#"{{"w":{deep}"#).as_bytes()).len() < 200);
    }

    let twice =
        r#"{"w":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[],"data_offsets":[1,2]}}"#;
    assert_eq!(message(&raw(twice, 2)), "m.safetensors: w appears twice in the header");
    let twice = message(&raw(r#"{"__metadata__":{},"__metadata__":{}}"#, 0));
    assert_eq!(twice, "m.safetensors: __metadata__ appears twice in the header");
}

#[test]
fn every_fault_of_one_tensor_has_its_message() {
    let case = |dtype, shape, begin, end, data| message(&raw(one(dtype, shape, begin, end), data));
    let span = "m.safetensors: w: its offsets span 4 bytes, its dtype and shape need 12";
    assert_eq!(case("BF16", "[2,3]", 0, 4, 4), span);
    let reversed = "m.safetensors: w: ends at byte 3 before it begins at 4";
    assert_eq!(case("U8", "[1]", 4, 3, 4), reversed);
    let shape = "[4294967296,4294967296]";
    let overflow = "m.safetensors: w: shape [4294967296, 4294967296] is larger than can be addressed";
    assert_eq!(case("U8", shape, 0, 4, 4), overflow);
    assert!(case("F64", "[1152921504606846976]", 0, 4, 4).contains("is larger than can be addressed"));
    let bits = "m.safetensors: w: shape [3] of F4 is 12 bits, not whole bytes";
    assert_eq!(case("F4", "[3]", 0, 1, 1), bits);
    let gap = "m.safetensors: w: begins at byte 2, where the data before it ends at 0 (a gap)";
    assert_eq!(case("U8", "[1]", 2, 3, 3), gap);
    let truncated = "m.safetensors: w: ends at byte 8 of the data, the file holds 5 (truncated)";
    assert_eq!(case("U8", "[8]", 0, 8, 5), truncated);
    let trailing = "m.safetensors: the tensors end at byte 1 of the data, the file holds 5 (trailing bytes)";
    assert_eq!(case("U8", "[1]", 0, 1, 5), trailing);
    // The largest offsets there are.
    assert!(case("U8", "[1]", u64::MAX - 1, u64::MAX, 0).contains("begins at byte 18446744073709551614"));
}

#[test]
fn gaps_and_overlaps_between_two_tensors() {
    let two = |begin, end| {
        let json = format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}},"b":{{"dtype":"U8","shape":[2],"data_offsets":[{begin},{end}]}}}}"#
        );
        message(&raw(json, 6))
    };
    assert_eq!(
        two(5, 7),
        "m.safetensors: b: begins at byte 5, where the data before it ends at 4 (a gap)"
    );
    let overlap = "m.safetensors: b: begins at byte 3, inside the tensor before it, which ends at 4 (an overlap)";
    assert_eq!(two(3, 5), overlap);
    assert!(two(0, 2).ends_with("which ends at 2 (an overlap)"));
}

#[test]
fn what_is_not_a_regular_file_is_refused_without_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let message = read_header(dir.path()).unwrap_err().to_string();
    assert!(message.ends_with(": a folder, not a regular file"), "{message}");
    let fifo = dir.path().join("f.safetensors");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let message = read_header(&fifo).unwrap_err().to_string();
    assert!(
        message.ends_with("f.safetensors: a pipe, not a regular file"),
        "{message}"
    );
    let message = read_header(&dir.path().join("none")).unwrap_err().to_string();
    assert!(message.contains("none: opening: "), "{message}");
}

/// Tensors laid out as a writer would, with random names, dtypes and shapes, some of them empty.
fn layout() -> impl Strategy<Value = Vec<TensorEntry>> {
    let tensor = (0..DTYPES.len(), prop::collection::vec(0usize..5, 0..4));
    prop::collection::btree_map("[a-z.0-9\"\\\\é\u{1}]{0,8}", tensor, 0..12).prop_map(|tensors| {
        let mut end = 0;
        let mut entries = Vec::new();
        for (name, (dtype, mut shape)) in tensors {
            // Four elements of any dtype are whole bytes.
            shape.push(4);
            let (dtype, begin) = (DTYPES[dtype], end);
            end += (shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64;
            entries.push(TensorEntry {
                name,
                dtype,
                shape,
                begin,
                end,
            });
        }
        entries
    })
}

fn file_of(tensors: &[TensorEntry], metadata: &Metadata) -> Vec<u8> {
    let mut bytes = encode_header(metadata, tensors);
    bytes.resize(bytes.len() + tensors.last().map_or(0, |t| t.end) as usize, 0);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn what_is_encoded_is_read(tensors in layout(), pairs in prop::collection::vec((".{0,6}", ".{0,6}"), 0..4)) {
        let metadata: Metadata = pairs.into_iter().collect();
        let bytes = file_of(&tensors, &metadata);
        let header = Sample::new(&bytes).read().unwrap();
        prop_assert_eq!(header.data_start % 8, 0);
        prop_assert_eq!(encode_header(&header.metadata, &header.tensors), &bytes[..header.data_start as usize]);
        prop_assert_eq!(&header.metadata, &metadata);
        prop_assert_eq!(&header.tensors, &tensors);
        // The format's own reader agrees.
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        prop_assert_eq!(theirs.len(), tensors.len());
    }

    #[test]
    fn no_corruption_panics_or_passes_unlike_the_crate(
        tensors in layout(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = file_of(&tensors, &Metadata::default());
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 8;
        for (at, byte) in flips {
            bytes[at.index(header)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let ours = Sample::new(&bytes).read();
        let theirs = safetensors::SafeTensors::deserialize(&bytes);
        // This reader is stricter (duplicate keys, a leading space), never laxer.
        prop_assert!(ours.is_err() || theirs.is_ok(), "{:?} {:?}", ours, theirs.err());
    }

    #[test]
    fn random_json_never_panics(json in "[\\[\\]{}\":,0-9a-z.eE+\\- \\\\]{0,60}", data in 0usize..9) {
        let _ = Sample::new(&raw(format!("{{{json}"), data)).read();
    }
}
