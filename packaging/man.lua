-- Manuals as man pages, for pandoc.

-- Links: a page of the same set is named as man pages are, another document by where
-- the package has it, and what only the checkout has by its text alone.
local sections = {
	vnumad = 8, vnumactl = 8, scx_vnuma = 8, ["vnuma-guest"] = 8, ["vnuma-run"] = 1, libvnuma = 3,
}
-- debhelper compresses those of more than 4096 bytes.
local documents = {
	["first-host"] = "vnuma-host/first-host.md",
	["first-guest"] = "vnuma-host/first-guest.md",
	["libvirt"] = "vnuma-host/libvirt.md.gz",
	["memory"] = "vnuma-host/memory.md.gz",
	["metrics"] = "vnuma-host/metrics.md.gz",
	["migration"] = "vnuma-host/migration.md.gz",
	["policies"] = "vnuma-host/policies.md.gz",
	["runtimes"] = "vnuma-run/runtimes.md.gz",
}

function Link(link)
	local name = link.target:match("^([%w_-]+)%.md")
	local text = pandoc.utils.stringify(link.content)
	if name and sections[name] then
		local page = { pandoc.Strong(name), pandoc.Str("(" .. sections[name] .. ")") }
		if text == name then
			return page
		end
		return { pandoc.Span(link.content), pandoc.Str(" ("), page[1], page[2], pandoc.Str(")") }
	elseif name and documents[name] then
		local where = "/usr/share/doc/" .. documents[name]
		return { pandoc.Span(link.content), pandoc.Str(" (" .. where .. ")") }
	end
	return link.content
end

-- A table is as wide as its longest words, and a terminal is not: a row becomes a term, the first cell, and what the others say.
-- Their headings are there if there are several.
function Table(whole)
	local simple = pandoc.utils.to_simple_table(whole)
	local items = {}
	for _, row in ipairs(simple.rows) do
		local term = row[1][1] and row[1][1].content or { pandoc.Str("-") }
		local texts = {}
		for column = 2, #row do
			local cell = row[column][1]
			if cell then
				local text = pandoc.List(cell.content)
				local heading = simple.headers[column][1]
				if #row > 2 and heading then
					text = pandoc.List(heading.content) .. { pandoc.Str(":"), pandoc.Space() } .. text
				end
				table.insert(texts, pandoc.Para(text))
			end
		end
		table.insert(items, { term, { texts } })
	end
	return pandoc.DefinitionList(items)
end
