//! Cache-line aligned scratch memory that is reused from tile to tile.

use bytemuck::{Pod, Zeroable};

/// One cache line: whole-line stores into a buffer then never straddle two.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Bytes that can be seen as a slice of any plain type. Grows, never shrinks; contents after [`Buffer::resize`] are
/// what the last user left.
#[derive(Default)]
pub struct Buffer {
    lines: Vec<Line>,
    len: usize,
}

impl Buffer {
    pub fn resize(&mut self, bytes: usize) {
        let lines = bytes.div_ceil(size_of::<Line>());
        if lines > self.lines.len() {
            // A fresh zeroed allocation: its pages cost nothing until they are used, and no old bytes are copied.
            self.lines = Vec::new();
            self.lines = bytemuck::zeroed_vec(lines);
        }
        self.len = bytes;
    }

    /// The buffer as `len / size_of::<T>()` values.
    pub fn of<T: Pod>(&self) -> &[T] {
        let bytes = &bytemuck::cast_slice::<Line, u8>(&self.lines)[..self.len];
        bytemuck::cast_slice(&bytes[..self.len / size_of::<T>() * size_of::<T>()])
    }

    pub fn of_mut<T: Pod>(&mut self) -> &mut [T] {
        let len = self.len;
        let bytes = &mut bytemuck::cast_slice_mut::<Line, u8>(&mut self.lines)[..len];
        bytemuck::cast_slice_mut(&mut bytes[..len / size_of::<T>() * size_of::<T>()])
    }

    pub fn bytes(&self) -> &[u8] {
        self.of()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.of_mut()
    }

    /// Resizes to `count` values and gives them.
    pub fn take<T: Pod>(&mut self, count: usize) -> &mut [T] {
        self.resize(count * size_of::<T>());
        self.of_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_are_aligned_and_sized() {
        let mut buffer = Buffer::default();
        buffer.take::<u32>(33)[32] = 7;
        assert_eq!(buffer.of::<u32>().len(), 33);
        assert_eq!(buffer.bytes().len(), 132);
        assert_eq!(buffer.bytes().as_ptr() as usize % 64, 0);
        assert_eq!(buffer.of::<u32>()[32], 7);
        buffer.resize(5);
        assert_eq!((buffer.of::<u16>().len(), buffer.of::<u32>().len()), (2, 1));
    }
}
