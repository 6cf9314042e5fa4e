use super::{portable, Job};
pub fn available() -> bool {
    false
}
pub fn run<J: Job>(j: J) -> J::Output {
    j.run(portable::Portable)
}
