//! The pages of a node, in chunks that exist once one of their pages was touched.

use crate::page::Page;
use vnuma_abi_dsm_wire::PageId;

/// Pages of a chunk.
const CHUNK: u64 = 512;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Table {
    chunks: Vec<Option<Box<[Page]>>>,
    pages: u64,
}

impl Table {
    pub fn new(pages: u64) -> Self {
        Self { chunks: vec![None; pages.div_ceil(CHUNK) as usize], pages }
    }

    /// Number of pages of the region.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// A page, if its chunk was touched.
    pub fn get(&self, page: PageId) -> Option<&Page> {
        let chunk = self.chunks.get((page.0 / CHUNK) as usize)?.as_ref()?;
        chunk.get((page.0 % CHUNK) as usize)
    }

    /// A page of the region; `fresh` makes those of its chunk when the first of them is touched.
    pub fn get_mut(&mut self, page: PageId, fresh: impl Fn(PageId) -> Page) -> &mut Page {
        let chunk = page.0 / CHUNK;
        let end = self.pages.min((chunk + 1) * CHUNK);
        let pages = self.chunks[chunk as usize]
            .get_or_insert_with(|| (chunk * CHUNK..end).map(|page| fresh(PageId(page))).collect());
        &mut pages[(page.0 % CHUNK) as usize]
    }

    /// The pages of all touched chunks.
    pub fn iter(&self) -> impl Iterator<Item = (PageId, &Page)> {
        let touched =
            self.chunks.iter().enumerate().filter_map(|(index, chunk)| Some((index, chunk.as_ref()?)));
        touched.flat_map(|(index, chunk)| {
            let first = index as u64 * CHUNK;
            chunk.iter().enumerate().map(move |(offset, page)| (PageId(first + offset as u64), page))
        })
    }

    /// The pages of all touched chunks.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (PageId, &mut Page)> {
        let touched =
            self.chunks.iter_mut().enumerate().filter_map(|(index, chunk)| Some((index, chunk.as_mut()?)));
        touched.flat_map(|(index, chunk)| {
            let first = index as u64 * CHUNK;
            chunk.iter_mut().enumerate().map(move |(offset, page)| (PageId(first + offset as u64), page))
        })
    }
}
