run=/slipstream/runs/@{name}
if [ -e "$run/config.toml" ]; then
  set -- --resume "$run"
else
  set -- @{recipe_file} --out "$run"
fi
exec slipstream launch "$@" --group controller@{remote} --listen "@{address}:@{port}"
