//! Values in the kernel's memory, with their types.

use crate::btf::{Btf, Id};
use crate::memory::{Memory, Symbols};
use anyhow::{Context, Result, ensure};

/// No text of the kernel that is read here is longer, nor is a mask of its nodes or CPUs.
const MOST_TEXT: u64 = 64;
const MOST_BITS: u64 = 8192;

/// A kernel that runs: its memory, its symbols, its types.
pub struct Kernel {
    memory: Memory,
    symbols: Symbols,
    btf: Btf,
}

/// A type of BTF, or a pointer to one.
#[derive(Clone, Copy, Debug)]
struct Shape {
    id: Id,
    pointers: u32,
}

/// What is at an address. Its name says how it was come by.
#[derive(Clone)]
pub struct Value<'k> {
    kernel: &'k Kernel,
    address: u64,
    shape: Shape,
    name: String,
}

impl Kernel {
    /// A kernel of these.
    pub fn new(memory: Memory, symbols: Symbols, btf: Btf) -> Self {
        Self { memory, symbols, btf }
    }

    /// Whether it has a symbol.
    pub fn has(&self, symbol: &str) -> bool {
        self.symbols.find(symbol).is_ok_and(|found| found.is_some())
    }

    fn address(&self, symbol: &str) -> Result<u64> {
        self.symbols.find(symbol)?.with_context(|| format!("symbol \"{symbol}\": this kernel has none"))
    }

    /// A variable. BTF does not know its type, so it is named: `int`, or `cpumask**` for a pointer to a pointer.
    pub fn global(&self, symbol: &str, type_name: &str) -> Result<Value<'_>> {
        self.at(self.address(symbol)?, type_name, symbol)
    }

    /// Something of which the address is known already.
    pub fn at(&self, address: u64, type_name: &str, name: &str) -> Result<Value<'_>> {
        let bare = type_name.trim_end_matches('*');
        let id = self.btf.named(bare).with_context(|| name.to_owned())?;
        let shape = Shape { id, pointers: (type_name.len() - bare.len()) as u32 };
        Ok(Value { kernel: self, address, shape, name: name.to_owned() })
    }

    /// A CPU's own variable.
    pub fn per_cpu(&self, symbol: &str, cpu: usize) -> Result<Value<'_>> {
        let id = self.btf.variable(symbol);
        let id = id.with_context(|| format!("BTF: no variable of CPUs \"{symbol}\""))?;
        let name = format!("{symbol} of CPU {cpu}");
        let address = self.address(symbol)?.wrapping_add(self.offset(cpu)?);
        Ok(Value { kernel: self, address, shape: Shape { id, pointers: 0 }, name })
    }

    /// What is to be added to an address of a variable for that of a CPU.
    pub fn offset(&self, cpu: usize) -> Result<u64> {
        self.global("__per_cpu_offset", "long unsigned int")?.index(cpu)?.word()
    }

    /// The value of a constant of an enumeration.
    pub fn constant(&self, name: &str) -> Result<i64> {
        self.btf.constant(name).with_context(|| format!("BTF: no constant \"{name}\""))
    }

    /// The name of the function at an address.
    pub fn function(&self, address: u64) -> Option<&str> {
        if address == 0 { None } else { self.symbols.name(address) }
    }
}

impl<'k> Value<'k> {
    /// Where it is.
    pub fn address(&self) -> u64 {
        self.address
    }

    fn is(&self, address: u64, shape: Shape, name: String) -> Self {
        Self { kernel: self.kernel, address, shape, name }
    }

    fn bytes(&self, length: u64) -> Result<Vec<u8>> {
        self.kernel.memory.read(self.address, length).with_context(|| self.name.clone())
    }

    fn size(&self) -> Result<u64> {
        if self.shape.pointers > 0 {
            return Ok(8);
        }
        self.kernel.btf.size(self.shape.id).with_context(|| self.name.clone())
    }

    fn found(&self, name: &str) -> Result<Option<(u64, Id)>> {
        let of_type = if self.shape.pointers > 0 { None } else { Some(self.shape.id) };
        of_type.map_or(Ok(None), |id| self.kernel.btf.field(id, name)).with_context(|| self.name.clone())
    }

    /// Whether it is a structure with that field.
    pub fn has(&self, field: &str) -> bool {
        self.found(field).is_ok_and(|found| found.is_some())
    }

    /// A field of it.
    pub fn field(&self, field: &str) -> Result<Self> {
        let name = format!("{}.{field}", self.name);
        let (offset, id) = self.found(field)?.with_context(|| format!("{name}: BTF knows no such field"))?;
        Ok(self.is(self.address.wrapping_add(offset), Shape { id, pointers: 0 }, name))
    }

    /// The structure that it is a field of.
    pub fn container(&self, type_name: &str, field: &str) -> Result<Self> {
        let whole = self.kernel.at(self.address, type_name, &self.name)?;
        let offset = whole.field(field)?.address - self.address;
        self.kernel.at(self.address.wrapping_sub(offset), type_name, &self.name)
    }

    /// An element, or of a plain value the one that is so many further on.
    pub fn index(&self, index: usize) -> Result<Self> {
        let name = format!("{}[{index}]", self.name);
        let element = match self.shape.pointers {
            0 => self.kernel.btf.element(self.shape.id).with_context(|| name.clone())?,
            _ => None,
        };
        let shape = element.map_or(self.shape, |id| Shape { id, pointers: 0 });
        let first = self.is(self.address, shape, name);
        let offset = first.size()?.wrapping_mul(index as u64);
        Ok(Self { address: self.address.wrapping_add(offset), ..first })
    }

    /// What it points to; none if that is nothing.
    pub fn follow(&self) -> Result<Option<Self>> {
        let shape = match self.shape.pointers {
            0 => {
                let target = self.kernel.btf.target(self.shape.id).with_context(|| self.name.clone())?;
                let id = target.with_context(|| format!("{}: no pointer", self.name))?;
                Shape { id, pointers: 0 }
            }
            pointers => Shape { id: self.shape.id, pointers: pointers - 1 },
        };
        let address = self.word()?;
        Ok((address != 0).then(|| self.is(address, shape, self.name.clone())))
    }

    /// What it points to, which has to be something.
    pub fn target(&self) -> Result<Self> {
        self.follow()?.with_context(|| format!("{}: NULL", self.name))
    }

    /// What a pointer of CPUs' own memory points to for a CPU.
    pub fn target_of(&self, cpu: usize) -> Result<Self> {
        let target = self.target()?;
        let address = target.address.wrapping_add(self.kernel.offset(cpu)?);
        Ok(Self { address, ..target })
    }

    /// Eight bytes of it, whatever it is.
    pub fn word(&self) -> Result<u64> {
        let bytes = self.bytes(8)?;
        Ok(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }

    /// A number, also an atomic one.
    pub fn number(&self) -> Result<i64> {
        if self.has("counter") {
            return self.field("counter")?.number();
        }
        let (btf, name) = (&self.kernel.btf, || self.name.clone());
        let signed = btf.signed(self.shape.id).with_context(name)?;
        let signed = signed.with_context(|| format!("{}: no number", self.name))?;
        let size = self.size()?;
        ensure!((1..=8).contains(&size), "{}: a number of {size} bytes", self.name);
        let bytes = self.bytes(size)?;
        let value = bytes.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        let unused = 64 - 8 * size as u32;
        Ok(if signed { (value << unused) as i64 >> unused } else { value as i64 })
    }

    /// Characters up to a zero, of an array or of what a pointer points to.
    pub fn text(&self) -> Result<String> {
        let is_array = self.kernel.btf.element(self.shape.id).with_context(|| self.name.clone())?.is_some();
        let from = if is_array { self.clone() } else { self.target()? };
        let length = if is_array { self.size()?.min(MOST_TEXT) } else { MOST_TEXT };
        let mut text = Vec::new();
        // Byte by byte: what is behind it may be no memory.
        for index in 0..length {
            let byte = self.kernel.memory.read(from.address + index, 1).with_context(|| self.name.clone())?;
            match byte[..] {
                [0] => break,
                _ => text.extend(byte),
            }
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// The bits that are set below a number.
    pub fn set(&self, below: usize) -> Result<Vec<usize>> {
        ensure!(below as u64 <= MOST_BITS, "{}: {below} bits, at most {MOST_BITS}", self.name);
        let bytes = self.bytes((below as u64).div_ceil(64) * 8)?;
        Ok((0..below).filter(|bit| bytes[bit / 8] >> (bit % 8) & 1 == 1).collect())
    }

    /// The same as a list such as `0-2,5`.
    pub fn bits(&self, below: usize) -> Result<String> {
        Ok(list(&self.set(below)?))
    }
}

/// Numbers that ascend, as a list such as `0-2,5`.
pub fn list(numbers: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let text = |(first, last): &(usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::btf::tests::small;
    use crate::memory::tests::kcore;

    const BASE: u64 = 0xffff_8880_0000_0000;

    /// Two `struct node`, of which the first points to the second, and a pointer of CPUs' own.
    fn kernel() -> Kernel {
        let mut memory = vec![0; 64];
        memory[..4].copy_from_slice(&(-2_i32).to_le_bytes());
        memory[8..16].copy_from_slice(&(BASE + 24).to_le_bytes());
        memory[24..28].copy_from_slice(&5_i32.to_le_bytes());
        memory[32..36].copy_from_slice(b"abcd");
        memory[48..56].copy_from_slice(&0b1011_0110_u64.to_le_bytes());
        memory[56..64].copy_from_slice(&BASE.to_le_bytes());
        let symbols = format!("{BASE:x} d first\n{:x} d mask\n{:x} d link\n", BASE + 48, BASE + 56);
        Kernel::new(
            Memory::open(Box::new(kcore(BASE, &memory))).unwrap(),
            Symbols::parse(symbols.leak()).unwrap(),
            Btf::parse(small().bytes()).unwrap(),
        )
    }

    #[test]
    fn values_are_followed_and_read() {
        let kernel = kernel();
        let first = kernel.global("first", "node").unwrap();
        assert_eq!(first.field("id").unwrap().number().unwrap(), -2);
        let second = first.field("next").unwrap().target().unwrap();
        assert_eq!(second.field("id").unwrap().number().unwrap(), 5);
        assert_eq!(second.field("name").unwrap().text().unwrap(), "abcd");
        assert_eq!(first.index(1).unwrap().address(), second.address());
        let link = kernel.global("link", "node*").unwrap();
        assert_eq!(link.target().unwrap().field("id").unwrap().number().unwrap(), -2);
        let next = second.field("next").unwrap().container("node", "next").unwrap();
        assert_eq!(next.address(), second.address());
        assert_eq!(kernel.global("mask", "int").unwrap().bits(8).unwrap(), "1-2,4-5,7");
    }

    #[test]
    fn errors_name_the_symbol_and_the_field() {
        let kernel = kernel();
        let text = |result: Result<i64>| format!("{:#}", result.unwrap_err());
        let first = kernel.global("first", "node").unwrap();
        assert_eq!(
            text(first.field("gone").and_then(|gone| gone.number())),
            "first.gone: BTF knows no such field"
        );
        assert_eq!(text(first.number()), "first: no number");
        // Its name is no address.
        let torn = first.field("next").unwrap().target().unwrap().field("next").unwrap().target().unwrap();
        let error = text(torn.field("id").and_then(|id| id.number()));
        assert_eq!(error, "first.next.next.id: no memory at 0x64636261, 4 bytes");
        let missing = kernel.global("missing", "int").map(|_| 0);
        assert_eq!(text(missing), "symbol \"missing\": this kernel has none");
    }

    #[test]
    fn numbers_are_a_list() {
        assert_eq!(list(&[]), "");
        assert_eq!(list(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
    }
}
