-- The instant of an event stream's first content and its token counts, written to dynamic metadata for the access log.
--
-- Place in the flow: an Envoy Lua filter, response path; the bytes are never touched. Until the first event that carries
-- generated content (text, reasoning, refusal, tool call, audio) it reads line by line and writes the wall clock in
-- microseconds under leadtime_lua/first_us. From then on a chunk is looked through for the word "usage" alone; each
-- event that ends with counts in it writes them under leadtime_usage, so that of each count the last one stays.
-- shared/labels.py answers the same questions for streams that pass through Python; a test runs one corpus through both.
-- Why not Envoy's own filter for usage: sse_to_metadata of 1.40 ends the whole process at an event whose data is a JSON
-- scalar (`data: null`), as some servers send between others.
--
-- Limits: an event-stream body that isn't encoded; first content of answers with status 200. It reads text, no JSON:
-- a usage object with braces in its strings is none. Nothing found leaves leadtime_lua/skip with a reason (encoded,
-- too_long, none), never a guess. An error in here costs one sample and no byte of the answer.

local NAMESPACE = "leadtime_lua"
local FIRST_CONTENT = "first_us"
local SKIP = "skip"
local USAGE_NAMESPACE = "leadtime_usage"
local MAX_BYTES_BEFORE_CONTENT = 1048576
local MAX_LINE_BYTES = 65536
local KEPT_OF_A_LONG_LINE = 16384 -- the event that ends an answer of the responses API holds all of it, then the usage
local MAX_TOKENS = 16777216
local LF, CR = 10, 13

-- Keys whose value is generated text: content if the string is not empty. A quote inside a JSON string is written \",
-- so a key that is only quoted by the model (\"content\":) never matches.
local TEXT_KEYS = {
  "content", "reasoning_content", "reasoning", "refusal", -- chat completions
  "text",                                                 -- completions; text blocks of Anthropic's stream
  "delta",                                                -- responses: the delta itself is the text
  "thinking", "partial_json",                             -- Anthropic's other deltas
}

local PATTERNS = {}
for _, key in ipairs(TEXT_KEYS) do
  PATTERNS[#PATTERNS + 1] = '"' .. key .. '"%s*:%s*"[^"]'
end
PATTERNS[#PATTERNS + 1] = '"tool_calls"%s*:%s*%[%s*{'
PATTERNS[#PATTERNS + 1] = '"function_call"%s*:%s*{%s*"'
PATTERNS[#PATTERNS + 1] = '"audio"%s*:%s*{%s*"'
PATTERNS[#PATTERNS + 1] = '"type"%s*:%s*"tool_use"'

-- Only data lines count: a keep-alive comment may hold anything. Of the responses API only deltas do: its other events
-- repeat what the client sent, metadata with keys of its choice among it.
local function carries_content(line)
  if line:sub(1, 5) ~= "data:" then
    return false
  end
  if line:find('"error"%s*:%s*{') then
    return false
  end
  if line:find('"type"%s*:%s*"response%.') and not line:find('"type"%s*:%s*"response%.[%w_.]*delta"') then
    return false
  end
  for _, pattern in ipairs(PATTERNS) do
    if line:find(pattern) then
      return true
    end
  end
  return false
end

-- The metadata object dies at every yield of the body iterator, so it is fetched for each write.
local function note(handle, key, value)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, key, value)
end

-- The last number of this name among an object's own members; nil where it is no token count.
local function count(members, name)
  local text = members:match('.*"' .. name .. '"%s*:%s*(%-?[%d.]+[eE]?[+-]?%d*)%s*[,}]')
  local number = text and tonumber(text)
  if number and number >= 0 and number <= MAX_TOKENS and number == math.floor(number) then
    return number
  end
end

-- Adds the token counts of a data line to `counts`; returns it, or a new table, or nil where there is none.
local function read_usage(line, counts)
  if line:sub(1, 5) ~= "data:" then
    return counts
  end
  for usage in line:gmatch('"usage"%s*:%s*(%b{})') do
    local details = (usage:match('"prompt_tokens_details"%s*:%s*(%b{})') or "")
    local more = (usage:match('"input_tokens_details"%s*:%s*(%b{})') or "")
    local members = "{" .. usage:sub(2, -2):gsub("%b{}", "{}") .. "}"
    counts = counts or {}
    counts.prompt_tokens = count(members, "prompt_tokens") or count(members, "input_tokens") or counts.prompt_tokens
    if not line:find('"type"%s*:%s*"message_start"') then -- it counts the token that opens an answer, not its length
      counts.completion_tokens = count(members, "completion_tokens")
        or count(members, "output_tokens")
        or counts.completion_tokens
    end
    counts.cached_tokens = count(details, "cached_tokens")
      or count(more, "cached_tokens")
      or count(members, "cache_read_input_tokens") or counts.cached_tokens
  end
  return counts
end

local function write_usage(handle, counts)
  local metadata = handle:streamInfo():dynamicMetadata()
  for name, value in pairs(counts) do
    metadata:set(USAGE_NAMESPACE, name, value)
  end
end

-- Where the unfinished line at the end of a text begins, by the last byte that ends one.
local function rest_of(text)
  local last = text:byte(-1)
  if last == LF or last == CR then
    return "", last
  end
  local newest = text:find("[\r\n][^\r\n]*$") -- from ends of lines alone: from every byte it would take their square
  return newest and text:sub(newest + 1) or text, 0
end

local function shortened(rest)
  if rest:sub(1, 5) ~= "data:" then
    return ":"
  end
  return "data:" .. rest:sub(-KEPT_OF_A_LONG_LINE)
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local kind = headers:get("content-type")
  if not kind or not kind:lower():find("text/event-stream", 1, true) then
    return
  end
  local looking = headers:get(":status") == "200"
  local encoding = headers:get("content-encoding")
  if encoding and encoding:lower() ~= "identity" then
    note(handle, SKIP, "encoded")
    return
  end
  local rest = ""
  local before = 0 -- the byte that ended the line before: LF of a CRLF ends nothing
  local counts -- of the event whose end hasn't come
  local seen_bytes = 0
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    if length > 0 then
      local text = chunk:getBytes(0, length)
      if rest ~= "" then
        text = rest .. text
      end
      if looking or counts or text:find('"usage"', 1, true) then
        local from = 1
        local stop = text:find("[\r\n]", from)
        while stop do
          local ending = text:byte(stop)
          if stop > from then
            local line = text:sub(from, stop - 1)
            if looking and carries_content(line) then
              note(handle, FIRST_CONTENT, handle:timestampString(EnvoyTimestampResolution.MICROSECOND))
              looking = false
            end
            if line:find('"usage"', 1, true) then
              counts = read_usage(line, counts)
            end
          elseif counts and not (ending == LF and before == CR) then
            write_usage(handle, counts)
            counts = nil
          end
          before = ending
          from = stop + 1
          stop = text:find("[\r\n]", from)
        end
        rest = text:sub(from)
      else
        rest, before = rest_of(text)
      end
      if #rest > MAX_LINE_BYTES then
        if looking and carries_content(rest) then
          note(handle, FIRST_CONTENT, handle:timestampString(EnvoyTimestampResolution.MICROSECOND))
          looking = false
        end
        rest = shortened(rest)
      end
      seen_bytes = seen_bytes + length
      if looking and seen_bytes > MAX_BYTES_BEFORE_CONTENT then
        note(handle, SKIP, "too_long")
        looking = false
      end
    end
  end
  if looking then
    note(handle, SKIP, "none")
  end
end
