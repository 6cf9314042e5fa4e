//! What the tests of several files need.

use std::path::Path;

use safetensors::tensor::TensorView;

use crate::tensor::Dtype;

/// A file by the safetensors crate's own writer: tensors of ascending bytes, and `format: pt`.
pub fn safetensors(tensors: &[(&str, Dtype, &[usize])]) -> Vec<u8> {
    let size = |dtype: Dtype, shape: &[usize]| shape.iter().product::<usize>() * dtype.bitsize() / 8;
    let bytes: Vec<u8> = (0..tensors.iter().map(|t| size(t.1, t.2)).max().unwrap_or(0))
        .map(|i| i as u8)
        .collect();
    let views = tensors.iter().map(|&(name, dtype, shape)| {
        (
            name,
            TensorView::new(dtype, shape.to_vec(), &bytes[..size(dtype, shape)]).unwrap(),
        )
    });
    safetensors::serialize(views, Some([("format".to_string(), "pt".to_string())].into())).unwrap()
}

/// A length, this JSON, and `data` zero bytes after it.
pub fn raw(json: impl AsRef<[u8]>, data: usize) -> Vec<u8> {
    let mut bytes = (json.as_ref().len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_ref());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// Writes files below `folder`, making sub-folders.
pub fn write_all(folder: &Path, files: &[(&str, &[u8])]) {
    for (name, bytes) in files {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}
